"""kvferry's plugin for vLLM: a llumlet in each server, through four stock extension points."""

from __future__ import annotations

__version__ = "0.1.0"


def register() -> None:
    """Entry point ``vllm.general_plugins``: runs in vLLM's API server, engine core and worker processes.

    Raises SettingsError for a vLLM version that was not tested and for a missing secret, but only in a server that
    asked for kvferry by naming it in ``VLLM_PLUGINS``: other programs in the same environment are left alone.
    """
    from vllm_plugin import compat
    from vllm_plugin.settings import settings_from_environment

    if not compat.is_requested():
        return
    compat.check_version()
    settings_from_environment()
    compat.install_engine_method()
    compat.install_input_batch_split()
