"""A suite that a script has started in the background inherits an ignored SIGINT: here Ctrl-C works again, in
what the tests start too. Hypothesis judges what examples give, not how long a busy machine takes for one."""

import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")


@pytest.fixture(scope="session", autouse=True)
def _one_thread_of_torch() -> Iterator[None]:
    """Tests run side by side, one a core: more threads would take the time of the others' servers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
