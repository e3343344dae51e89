"""The blocks of Flux in ComfyUI, which HunyuanVideo has as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from comfy.ldm.flux import layers as native
from comfy.ldm.flux import math as native_math
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks.pieces import unfit_input, untouched
from diffkern.cache.rotary import Tables, rotary_tables, unfit_matrices
from diffkern.comfyui.norms import norm_kind
from diffkern.comfyui.qk import norm_and_rotate, norms_fuse
from diffkern.comfyui.recipe import MODULATION, QK_NORM_ROPE, ComfyRecipe, Samples, in_training, sample_options
from diffkern.ops import norm_modulate, qk_norm_rope

#: Where the stock forward cuts off what float16 cannot hold.
_FP16_MAX = 65504


class FluxBlock(ComfyRecipe):
    """What the two kinds of blocks share.

    A residual is written where it lies, as the stock blocks do: their callers go on with the tensor that they gave.

    Attributes:
        native_class: The class of ComfyUI whose forward this is.
    """

    families: ClassVar[frozenset[str]] = frozenset({MODULATION, QK_NORM_ROPE})
    exact_families: ClassVar[frozenset[str]] = frozenset({QK_NORM_ROPE})
    ops = ("norm_modulate", "qk_norm_rope")
    versions = "ComfyUI 0.33"
    words: ClassVar[frozenset[str]] = frozenset(
        {
            "attn1_output_patch",
            "attn1_patch",
            "attn_mask",
            "dim",
            "extra_options",
            "k",
            "mask",
            "nan",
            "neginf",
            "patches",
            "pe",
            "posinf",
            "q",
            "skip_reshape",
            "transformer_options",
            "v",
        }
    )

    native_class: ClassVar[type[nn.Module]]

    @override
    def sources(self) -> tuple[Callable[..., Any], ...]:
        return self.native_class.forward, native.QKNorm.forward, native.apply_mod, native_math.attention

    @staticmethod
    def _refusal(
        module: Any, x: Tensor, vec: Any, tokens: int, pe: Any, parts: Any, options: dict[str, Any]
    ) -> str | None:
        if in_training():
            return "ComfyUI is training"
        reason = unfit_input(x)
        if reason is not None:
            return reason
        if _dtype_of(vec) != x.dtype:
            return "its modulation is not of the dtype of the hidden states"
        if parts is not None:
            return "its tokens are modulated in parts"
        patches = options.get("patches", {})
        if "attn1_patch" in patches or "attn1_output_patch" in patches:
            return "another node patches its attention, and expects queries and keys that are not rotated yet"
        if pe is None:
            return None
        if type(pe) is Tensor and pe.ndim == 6 and pe.shape[2] > tokens:
            pe = pe[:, :, :tokens]  # the stock rotation does not need the rest either
        return unfit_matrices(pe, x.device, x.shape[0], module.num_heads, tokens)

    def _norms_that_run_stock(self, norms: dict[str, Any]) -> tuple[str, ...]:
        """Names the norms that cannot be computed around, and all that belongs to a family that is not chosen."""
        stock: tuple[str, ...] = ()
        for name, norm in norms.items():
            if isinstance(norm, native.QKNorm):
                fuses = untouched(norm, native.QKNorm) and norms_fuse(norm.query_norm, norm.key_norm)
                fuses = fuses and QK_NORM_ROPE in self.chosen
            else:
                # A norm with weights would have to be read through ComfyUI's casts; Flux has none.
                fuses = norm_kind(norm) == "layer" and norm.weight is None and MODULATION in self.chosen
            if not fuses:
                stock += (name,)
        return stock

    def _rotary(self, pe: Tensor | None) -> Tables | None:
        return None if pe is None or QK_NORM_ROPE not in self.chosen else rotary_tables(pe, "interleaved")

    def _queries_keys_values(
        self, norm: Any, qkv: Tensor, heads: int, tables: Tables | None, fuse_norms: bool, provider: str | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Parts ``[B, H, S, D]`` of a packed projection, the first two normalised, and rotated if there are tables."""
        q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        if fuse_norms and not self.exact:
            q, k = norm_and_rotate(
                q, k, norm.query_norm, norm.key_norm, tables, tables,
                fuse_norms=True, across_heads=None, pairing="interleaved", provider=provider,
            )  # fmt: skip
        else:
            q, k = norm(q, k, v)
            if tables is not None:
                q, k = qk_norm_rope(q, k, cos=tables[0], sin=tables[1], norm=None, provider=provider)
        return q, k, v

    def _modulate(self, norm: Any, x: Tensor, modulation: Any, fuse: bool, provider: str | None) -> Tensor:
        if fuse:
            return norm_modulate(x, modulation.scale, modulation.shift, eps=norm.eps, norm="layer", provider=provider)
        y: Tensor = native.apply_mod(norm(x), 1 + modulation.scale, modulation.shift)
        return y

    def _add(self, x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        if MODULATION in self.chosen:
            return x.addcmul_(y, gate)
        return x.add_(y * gate)


class FluxDoubleBlock(FluxBlock):
    """``DoubleStreamBlock``: image and text, each with its own weights, in one attention."""

    op = "comfy_flux_double_block"
    fingerprints = frozenset({"468bc39868d0d493"})
    words: ClassVar[frozenset[str]] = FluxBlock.words | {"img_slice"}
    native_class = native.DoubleStreamBlock

    @staticmethod
    @override
    def arguments(
        img: Tensor,
        txt: Tensor,
        vec: Any,
        pe: Tensor | None,
        attn_mask: Tensor | None = None,
        modulation_dims_img: Any = None,
        modulation_dims_txt: Any = None,
        transformer_options: dict[str, Any] | None = None,
    ) -> tuple[Any, ...]:
        return img, txt, vec, pe, attn_mask, modulation_dims_img, modulation_dims_txt, transformer_options or {}

    @override
    def declines(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        img, txt, vec, pe, _, img_parts, txt_parts, options = call
        reason = unfit_input(txt)
        if reason is not None:
            return reason
        parts = txt_parts if img_parts is None else img_parts
        return self._refusal(module, img, vec, img.shape[1] + txt.shape[1], pe, parts, options)

    @override
    def stock_pieces(self, module: nn.Module, call: tuple[Any, ...]) -> tuple[str, ...]:
        block: Any = module
        norms = {name: getattr(block, name) for name in ("img_norm1", "img_norm2", "txt_norm1", "txt_norm2")}
        norms |= {"img_attn.norm": block.img_attn.norm, "txt_attn.norm": block.txt_attn.norm}
        return self._norms_that_run_stock(norms)

    @override
    def compute(
        self, module: nn.Module, call: tuple[Any, ...], provider: str | None, stock: tuple[str, ...]
    ) -> tuple[Tensor, Tensor]:
        block: Any = module
        img, txt, vec, pe, mask, _, _, options = call
        img_mods, txt_mods = (block.img_mod(vec), block.txt_mod(vec)) if block.modulation else vec
        tables, length = self._rotary(pe), txt.shape[1]
        ends = {"txt": slice(0, length), "img": slice(length, length + img.shape[1])}

        streams = []
        for name, x, mods in (("txt", txt, txt_mods), ("img", img, img_mods)):
            attention, norm = getattr(block, f"{name}_attn"), getattr(block, f"{name}_norm1")
            y = self._modulate(norm, x, mods[0], f"{name}_norm1" not in stock, provider)
            fuse_norms = f"{name}_attn.norm" not in stock
            streams.append(
                self._queries_keys_values(
                    attention.norm, attention.qkv(y), block.num_heads, _of(tables, ends[name]), fuse_norms, provider
                )
            )
        q, k, v = (torch.cat(pair, dim=2) for pair in zip(*streams, strict=True))
        y = native.attention(q, k, v, pe=None if tables is not None else pe, mask=mask, transformer_options=options)

        results = []
        for name, x, mods in (("img", img, img_mods), ("txt", txt, txt_mods)):
            part = getattr(block, f"{name}_attn").proj(y[:, ends[name]])
            norm, fuse = getattr(block, f"{name}_norm2"), f"{name}_norm2" not in stock
            x = self._add(x, part, mods[0].gate)
            part = getattr(block, f"{name}_mlp")(self._modulate(norm, x, mods[1], fuse, provider))
            results.append(self._add(x, part, mods[1].gate))
        img, txt = results
        return img, _finite(txt)

    @override
    def samples(
        self, module: nn.Module, tokens: int, device: torch.device, dtype: torch.dtype
    ) -> list[tuple[Any, ...]]:
        block: Any = module
        random, size = Samples(device, dtype), block.hidden_size
        vec: Any = random(2, size, scale=0.5)
        if not block.modulation:
            vec = tuple(tuple(_modulation(random, size) for _ in range(2)) for _ in range(2))
        # As many text tokens as image tokens, so that a proof can lay both results on top of each other.
        img, txt = random(2, tokens, size), random(2, tokens, size)
        return [
            (img, txt, vec, rotation, None, None, None, sample_options())
            for rotation in _rotations(block, 2 * tokens, device)
        ]


class FluxSingleBlock(FluxBlock):
    """``SingleStreamBlock``: attention and feed-forward side by side, between two linear layers."""

    op = "comfy_flux_single_block"
    fingerprints = frozenset({"caf9a31670dcd931"})
    native_class = native.SingleStreamBlock

    @staticmethod
    @override
    def arguments(
        x: Tensor,
        vec: Any,
        pe: Tensor | None,
        attn_mask: Tensor | None = None,
        modulation_dims: Any = None,
        transformer_options: dict[str, Any] | None = None,
    ) -> tuple[Any, ...]:
        return x, vec, pe, attn_mask, modulation_dims, transformer_options or {}

    @override
    def declines(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        x, vec, pe, _, parts, options = call
        return self._refusal(module, x, vec, x.shape[1], pe, parts, options)

    @override
    def stock_pieces(self, module: nn.Module, call: tuple[Any, ...]) -> tuple[str, ...]:
        block: Any = module
        return self._norms_that_run_stock({"pre_norm": block.pre_norm, "norm": block.norm})

    @override
    def compute(self, module: nn.Module, call: tuple[Any, ...], provider: str | None, stock: tuple[str, ...]) -> Tensor:
        block: Any = module
        x, vec, pe, mask, _, options = call
        modulation = block.modulation(vec)[0] if block.modulation else vec
        y = block.linear1(self._modulate(block.pre_norm, x, modulation, "pre_norm" not in stock, provider))
        qkv, mlp = y.split((3 * block.hidden_size, block.mlp_hidden_dim_first), dim=-1)
        tables = _of(self._rotary(pe), slice(0, x.shape[1]))
        q, k, v = self._queries_keys_values(block.norm, qkv, block.num_heads, tables, "norm" not in stock, provider)
        y = native.attention(q, k, v, pe=None if tables is not None else pe, mask=mask, transformer_options=options)
        if block.yak_mlp:
            up, gate = mlp.chunk(2, dim=-1)
            mlp = block.mlp_act(gate) * up
        else:
            mlp = block.mlp_act(mlp)
        return _finite(self._add(x, block.linear2(torch.cat((y, mlp), dim=2)), modulation.gate))

    @override
    def samples(
        self, module: nn.Module, tokens: int, device: torch.device, dtype: torch.dtype
    ) -> list[tuple[Any, ...]]:
        block: Any = module
        random, size = Samples(device, dtype), block.hidden_size
        vec = random(2, size, scale=0.5) if block.modulation else _modulation(random, size)
        x = random(2, tokens, size)
        return [(x, vec, rotation, None, None, sample_options()) for rotation in _rotations(block, tokens, device)]


def _dtype_of(modulation: Any) -> torch.dtype:
    """The dtype of a modulation, or of the vector that a block computes its own from."""
    while not isinstance(modulation, Tensor):
        modulation = modulation[0] if isinstance(modulation, (tuple, list)) else modulation.scale
    return modulation.dtype


def _of(tables: Tables | None, tokens: slice) -> Tables | None:
    """The rotary tables of some tokens: tables with a single row are those of all."""
    if tables is None or tables[0].shape[2] == 1:
        return tables
    return tables[0][:, :, tokens], tables[1][:, :, tokens]


def _finite(x: Tensor) -> Tensor:
    return torch.nan_to_num(x, nan=0.0, posinf=_FP16_MAX, neginf=-_FP16_MAX) if x.dtype == torch.float16 else x


def _rotations(block: Any, tokens: int, device: torch.device) -> tuple[Tensor | None, ...]:
    """Rotary embeddings of sample calls: one for each token, one for all of them, none."""
    random, pairs = Samples(device, torch.float32), block.hidden_size // block.num_heads // 2
    return random.rotations(1, 1, tokens, pairs), random.rotations(1, 1, 1, pairs), None


def _modulation(random: Samples, size: int) -> Any:
    return native.ModulationOut(*(random(2, 1, size, scale=0.5) for _ in range(3)))


DOUBLE, SINGLE = FluxDoubleBlock(), FluxSingleBlock()
