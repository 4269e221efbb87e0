"""vLLM's own scheduler with a migration agent beside it (``--scheduler-cls``).

It schedules nothing differently: it tells the agent what was scheduled and what came out, holds back requests that are
to go on from another instance until their output tokens are here, and takes no request that was to start at once and
cannot.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm_plugin import compat
from vllm_plugin.engine import EngineAgent
from vllm_plugin.settings import growth_tokens_from_environment


class KvferryScheduler(compat.AsyncScheduler):
    """A subclass of AsyncScheduler: one of Scheduler would switch async scheduling off."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kvferry = EngineAgent(compat.EnginePort(self), growth_tokens=growth_tokens_from_environment())

    def add_request(self, request: compat.Request) -> None:
        if not self.kvferry.receive(request):
            super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> compat.SchedulerOutput:
        output = super().schedule(throttle_prefills)
        self.kvferry.after_schedule(output)
        return output

    def update_from_output(
        self, scheduler_output: compat.SchedulerOutput, model_runner_output: compat.ModelRunnerOutput
    ) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.kvferry.after_step()
        return outputs

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: compat.RequestStatus
    ) -> list[compat.Request]:
        finished: list[compat.Request] = super().finish_requests(request_ids, finished_status)
        self.kvferry.after_finish(finished)
        return finished
