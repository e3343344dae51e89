"""The image VAE that several pipelines share."""

from __future__ import annotations

from diffusers import AutoencoderKL


def image_vae() -> AutoencoderKL:
    """Of the Stable Diffusion kind: 4 latent channels, 2 x 2 pixels per latent."""
    return _vae(latent_channels=4, channels=(32, 64), groups=32)


def shifted_image_vae(latent_channels: int) -> AutoencoderKL:
    """Of the Flux and Stable Diffusion 3 kind: latents shifted, no quantisation convolutions."""
    return _vae(
        latent_channels=latent_channels,
        channels=(4,),
        groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0609,
        scaling_factor=1.5035,
    )


def _vae(latent_channels: int, channels: tuple[int, ...], groups: int, **options: float | bool) -> AutoencoderKL:
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=latent_channels,
        block_out_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        layers_per_block=1,
        norm_num_groups=groups,
        sample_size=32,
        **options,
    )
