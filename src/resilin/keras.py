"""The short name of `resilin.integrations.keras`: `from resilin.keras import Model`.

Names are loaded on first use, so that importing this loads neither Keras nor its backend.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilin.integrations.keras import Model, ReadOut, accumulate

__all__ = ["Model", "ReadOut", "accumulate"]


def __getattr__(name: str) -> Any:
    """Loads a public name on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'resilin.keras' has no attribute {name!r}")
    import resilin.integrations.keras as home

    globals()[name] = value = getattr(home, name)
    return value


def __dir__() -> list[str]:
    """The public names, also those not loaded yet."""
    return sorted([*globals(), *__all__])
