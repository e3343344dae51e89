"""Trains the transformer and its text encoder together, by flow matching as LTXPipeline runs it backwards.

A latent video ``x`` and noise ``e`` meet at ``(1 - sigma) x + sigma e``; the transformer learns ``e - x``, which
is what the Euler scheduler steps along. The text encoder sees the whole padded prompt without a mask, as in the
pipeline; the transformer needs only its first tokens, since the mask hides the rest from it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLLTXVideo, LTXPipeline, LTXVideoTransformer3DModel
from torch import Tensor, nn
from transformers import T5EncoderModel, T5Tokenizer

from tiny_ltx.models import FRAME_RATE, PROMPT_TOKENS
from tiny_ltx.optimizer import Optimizer
from tiny_ltx.progress import Average, Training
from tiny_ltx.scenes import BACKGROUNDS, COLOURS, DIRECTIONS, SHAPES, Scenes, caption, draw, random_scenes
from tiny_ltx.train_vae import encode

#: How often a caption leaves out the colour, the shape, the direction and the background.
LEFT_OUT = (0.08, 0.08, 0.08, 0.4)
#: How often there is no caption at all, or one of unknown words only, as guidance needs it.
NO_CAPTION = 0.12
#: Words of the longest caption without a meaning.
UNKNOWN_WORDS = 12
#: Tokens of a prompt that any caption fills, with its end.
USED_TOKENS = 16
#: How much more often the noisy half of the trajectory is trained, as the pipeline's scheduler shifts it.
SHIFT = 2.0


class Captions:
    """The tokens of every caption there is, to look captions up on the device."""

    def __init__(self, tokenizer: T5Tokenizer, device: torch.device) -> None:
        texts = [
            caption(colour, shape, direction, background)
            for colour in (*COLOURS, None)
            for shape in (*SHAPES, None)
            for direction in (*DIRECTIONS, None)
            for background in (*BACKGROUNDS, None)
        ]
        self._sizes = (len(COLOURS), len(SHAPES), len(DIRECTIONS), len(BACKGROUNDS))
        meaningless = [" ".join(["?"] * words) for words in range(UNKNOWN_WORDS + 1)]
        self._first_meaningless = len(texts)
        tokens = tokenizer(
            texts + meaningless, padding="max_length", max_length=PROMPT_TOKENS, truncation=True, return_tensors="pt"
        )
        self._ids = tokens.input_ids.to(device)
        self._masks = tokens.attention_mask.to(device)

    def of(self, scenes: Scenes, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Returns ids and masks, [n, PROMPT_TOKENS], of captions that leave something out now and then."""
        device, n = generator.device, len(scenes)
        number = torch.zeros(n, dtype=torch.long, device=device)
        values = (scenes.colour, scenes.shape, scenes.direction, scenes.background)
        for value, size, left_out in zip(values, self._sizes, LEFT_OUT, strict=True):
            told = torch.rand(n, generator=generator, device=device) >= left_out
            number = number * (size + 1) + torch.where(told, value, size)
        meaningless = self._first_meaningless + torch.randint(
            UNKNOWN_WORDS + 1, (n,), generator=generator, device=device
        )
        # Half of them are empty: that is what the pipeline takes if there is no negative prompt.
        empty = torch.rand(n, generator=generator, device=device) < 0.5
        meaningless = torch.where(empty, self._first_meaningless, meaningless)
        none = torch.rand(n, generator=generator, device=device) < NO_CAPTION
        number = torch.where(none, meaningless, number)
        return self._ids[number], self._masks[number]


@torch.no_grad()
def encode_pool(
    vae: AutoencoderKLLTXVideo, video: tuple[int, int, int], n: int, seed: int, batch_size: int = 256
) -> tuple[Tensor, Scenes]:
    """Draws and encodes ``n`` videos: normalised latents as the transformer takes them, [n, tokens, channels]."""
    device = next(vae.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    latents, scenes = [], []
    for start in range(0, n, batch_size):
        scene = random_scenes(min(batch_size, n - start), generator)
        normal = LTXPipeline._normalize_latents(encode(vae, draw(scene, *video)), vae.latents_mean, vae.latents_std)
        latents.append(LTXPipeline._pack_latents(normal))
        scenes.append(scene)
    merged = Scenes(**{name: torch.cat([getattr(s, name) for s in scenes]) for name in Scenes.__annotations__})
    return torch.cat(latents), merged


def train_denoiser(
    transformer: LTXVideoTransformer3DModel,
    text_encoder: T5EncoderModel,
    tokenizer: T5Tokenizer,
    vae: AutoencoderKLLTXVideo,
    training: Training,
    batch_size: int,
    pool_size: int,
    video: tuple[int, int, int],
    seed: int,
) -> None:
    """Trains ``transformer`` and ``text_encoder`` in place on videos of ``(num_frames, height, width)``."""
    device = next(transformer.parameters()).device
    latents, scenes = encode_pool(vae, video, pool_size, seed)
    generator = torch.Generator(device).manual_seed(seed + 1)
    captions = Captions(tokenizer, device)
    space, time = vae.spatial_compression_ratio, vae.temporal_compression_ratio
    num_frames, height, width = (video[0] - 1) // time + 1, video[1] // space, video[2] // space

    transformer.train()
    text_encoder.train()
    parameters = [*transformer.parameters(), *text_encoder.parameters()]
    matrices = _inner_matrices(transformer, text_encoder)
    others = [p for p in parameters if all(p is not matrix for matrix in matrices)]
    optimizer = Optimizer(matrices, others, matrix_rate=0.04, rate=2e-3)
    average = Average(parameters, decay=0.998)
    for step, share in training.run():
        chosen = torch.randint(len(latents), (batch_size,), generator=generator, device=device)
        clean = latents[chosen]
        batch = Scenes(**{name: getattr(scenes, name)[chosen] for name in Scenes.__annotations__})
        ids, masks = captions.of(batch, generator)
        noise = torch.randn(clean.shape, generator=generator, device=device)
        sigma = _random_sigmas(batch_size, generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            text = text_encoder(ids)[0]
            flow = transformer(
                hidden_states=torch.lerp(clean, noise, sigma[:, None, None]),
                encoder_hidden_states=text[:, :USED_TOKENS],
                timestep=sigma * 1000,
                encoder_attention_mask=masks[:, :USED_TOKENS],
                num_frames=num_frames,
                height=height,
                width=width,
                rope_interpolation_scale=(time / FRAME_RATE, space, space),
                return_dict=False,
            )[0]
        loss = F.mse_loss(flow.float(), noise - clean)
        loss.backward()
        optimizer.step(share)
        average.update(step)
        training.say(step, 100, flow=loss)
    average.put()
    transformer.eval()
    text_encoder.eval()


def _inner_matrices(transformer: LTXVideoTransformer3DModel, text_encoder: T5EncoderModel) -> list[nn.Parameter]:
    """The weights between hidden states; not those that read latents or words, or write latents."""
    outermost = (transformer.proj_in, transformer.proj_out)
    modules = [*transformer.modules(), *text_encoder.modules()]
    return [m.weight for m in modules if isinstance(m, nn.Linear) and m not in outermost]


def _random_sigmas(n: int, generator: torch.Generator) -> Tensor:
    """Noise levels from 0 to 1: a logistic normal shifted towards noise, and a tenth of them uniform."""
    normal = torch.sigmoid(torch.randn(n, generator=generator, device=generator.device))
    shifted = SHIFT * normal / (1 + (SHIFT - 1) * normal)
    uniform = torch.rand(n, generator=generator, device=generator.device)
    return torch.where(torch.rand(n, generator=generator, device=generator.device) < 0.1, uniform, shifted)
