"""Every piece of state that must survive an interruption, in one place.

An object that keeps state over steps has ``state_dict`` / ``load_state_dict`` and is registered here under a name; the
checkpointer saves and restores the registry as a whole. State that is not registered does not survive: there is no
second way.
"""

from __future__ import annotations

from typing import Any, Protocol

from openrlhf_like.types import UserError


class Stateful(Protocol):
    """What the registry keeps."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any) -> None: ...


class StateRegistry:
    """Named owners of state, saved and loaded together."""

    def __init__(self) -> None:
        self._owners: dict[str, Stateful] = {}

    def register(self, name: str, owner: Stateful) -> None:
        """Add an owner; a name used twice is an error."""
        if name in self._owners:
            raise ValueError(f"state {name!r} is registered twice")
        self._owners[name] = owner

    def state_dict(self) -> dict[str, Any]:
        """The state of every owner by name."""
        return {name: owner.state_dict() for name, owner in self._owners.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give every owner its state back.

        Raises:
            UserError: the checkpoint lacks the state of an owner, or an owner refuses it: it was written by another
                command or settings.
        """
        missing = sorted(set(self._owners) - set(state))
        if missing:
            raise UserError(
                f"--ckpt.load_enable: the checkpoint has no state of {', '.join(missing)}; it was written with other "
                "settings. Give those of the interrupted run, or start without --ckpt.load_enable"
            )
        for name, owner in self._owners.items():
            try:
                owner.load_state_dict(state[name])
            except ValueError as error:
                message = f"--ckpt.load_enable: the checkpoint's state of {name} does not fit: {error}"
                raise UserError(message) from error


class Counters:
    """Plain numbers of a run: the step, the updates made, the samples seen."""

    def __init__(self, **start: float) -> None:
        self.values: dict[str, float] = dict(start)

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def __setitem__(self, name: str, value: float) -> None:
        self.values[name] = value

    def state_dict(self) -> dict[str, Any]:
        """The numbers."""
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the numbers back."""
        self.values.update(state)
