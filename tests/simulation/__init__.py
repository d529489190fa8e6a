"""The real scheduler around a simulated worker (worker.py), turn by turn (world.py) or on a virtual clock
with simulated tokenizers and clients (simulator.py), where one seed decides everything (seeds.py)."""

from tests.simulation.clients import Client
from tests.simulation.worker import EOS, VOCAB, check_shared, expected
from tests.simulation.world import World

__all__ = ["EOS", "VOCAB", "Client", "World", "check_shared", "expected"]
