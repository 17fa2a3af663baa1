"""Data that may arrive as a reference into the object store."""

from __future__ import annotations

from typing import Any


def resolve(value: Any) -> Any:
    """The object itself: an ObjectRef is fetched, a list of them too; anything else passes through."""
    if isinstance(value, list) and any(type(v).__name__ == "ObjectRef" for v in value):
        import ray

        return [ray.get(v) if type(v).__name__ == "ObjectRef" else v for v in value]
    if type(value).__name__ == "ObjectRef":
        import ray

        return ray.get(value)
    return value
