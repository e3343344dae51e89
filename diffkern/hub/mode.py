"""What a model is doing: inference or training, eager or compiled."""

from __future__ import annotations

from enum import Flag, auto


class Mode(Flag):
    """What a kernel is used for; ``INFERENCE | TORCH_COMPILE`` and ``TRAINING | TORCH_COMPILE`` are modes too.

    ``TORCH_COMPILE`` alone stands for both of these.
    """

    INFERENCE = auto()
    TRAINING = auto()
    TORCH_COMPILE = auto()

    @classmethod
    def parse(cls, text: str) -> Mode:
        """Reads ``"training"`` or ``"inference|torch_compile"``.

        Raises:
            ValueError: it is no mode.
        """
        mode = cls(0)
        for part in text.split("|"):
            try:
                mode |= cls[part.strip().upper()]
            except KeyError:
                raise ValueError(f"{text!r} is no mode: join {', '.join(MODE_NAMES)} with '|'") from None
        if cls.INFERENCE in mode and cls.TRAINING in mode:
            raise ValueError(f"{text!r} is no mode: a call is either inference or training")
        return mode

    @property
    def text(self) -> str:
        """The mode as :meth:`parse` reads it."""
        return "|".join(member.name.lower() for member in Mode if member in self and member.name)


MODE_NAMES = ("inference", "training", "torch_compile")

_COMPILED = Mode.TORCH_COMPILE
#: For each mode of a call, the modes of a rule that fit it, the best first: what trains can also infer, and what
#: compiles also runs eagerly, but not the other way round.
PREFERENCE = {
    Mode.INFERENCE: (Mode.INFERENCE, Mode.INFERENCE | _COMPILED, _COMPILED, Mode.TRAINING, Mode.TRAINING | _COMPILED),
    Mode.TRAINING: (Mode.TRAINING, Mode.TRAINING | _COMPILED),
    Mode.INFERENCE | _COMPILED: (Mode.INFERENCE | _COMPILED, _COMPILED, Mode.TRAINING | _COMPILED),
    Mode.TRAINING | _COMPILED: (Mode.TRAINING | _COMPILED, _COMPILED),
}
