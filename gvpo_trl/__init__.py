"""GVPO for interactive coding agents, as a TRL trainer.

Each public name loads its module on first use: `import gvpo_trl` costs nothing, and the command line starts at once.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gvpo_trl.config import GVPOConfig
    from gvpo_trl.rollout.callback import MultiTurnRollout
    from gvpo_trl.trainer import GVPOTrainer

__version__ = "0.1.0"

__all__ = ["GVPOConfig", "GVPOTrainer", "MultiTurnRollout", "__version__"]

_MODULE_OF = {
    "GVPOConfig": "gvpo_trl.config",
    "GVPOTrainer": "gvpo_trl.trainer",
    "MultiTurnRollout": "gvpo_trl.rollout.callback",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
