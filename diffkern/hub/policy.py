"""What a user allows the Hub loader: whether it may run at all, whose code, and pinned by what."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

#: Switches kernels of the Hub off, like ``USE_HUB_KERNELS``, which transformers has.
HUB_VARIABLE = "DIFFKERN_HUB"
TRANSFORMERS_VARIABLE = "USE_HUB_KERNELS"
#: Names the lock file.
LOCK_VARIABLE = "DIFFKERN_LOCK"
LOCK_FILE = "diffkern.lock"

_OFF = ("0", "OFF", "NO", "FALSE")


class HubError(RuntimeError):
    """A kernel cannot be had. The message is a reason that a user can act on."""


class InputError(HubError):
    """What the user named is wrong: a kernel, a repository, or a file that is missing or something else."""


@dataclass(frozen=True)
class Policy:
    """What a configuration allows.

    Attributes:
        trust_remote_code: Whether publishers that the Hub does not list as trusted may run code: True for all of
            them, or their repositories.
        lock: The lock file; None means the one of the environment or of the working directory, if there is one.
        strict: Whether a check that cannot be made refuses the kernel, where otherwise it warns.
    """

    trust_remote_code: bool | tuple[str, ...] = False
    lock: str | None = None
    strict: bool = False

    def trusts(self, repository: str) -> bool:
        """Whether the user vouches for a repository of any publisher."""
        trust = self.trust_remote_code
        return trust if isinstance(trust, bool) else repository in trust

    def lock_path(self) -> Path | None:
        """The lock file to obey, or None.

        Raises:
            HubError: one is named and is not there.
        """
        named = self.lock or os.environ.get(LOCK_VARIABLE)
        if named:
            path = Path(named).expanduser().absolute()
            if not path.is_file():
                raise HubError(f"the lock file {path} is not there: write it with `diffkern hub lock --lock {path}`")
            return path
        path = Path(LOCK_FILE).absolute()
        return path if path.is_file() else None


def switched_off() -> str | None:
    """Why kernels of the Hub are switched off for this process, or None."""
    for variable in (HUB_VARIABLE, TRANSFORMERS_VARIABLE):
        value = os.environ.get(variable, "")
        if value.strip().upper() in _OFF:
            return f"kernels of the Hub are switched off by {variable}={value}"
    return None
