"""What a run does between two units of work: it shows progress to the hang watch and acts on signals."""

from flux_ref import ranks
from flux_ref.config import Config
from flux_ref.ranks import World
from flux_ref.run.hang_watch import HangWatch
from flux_ref.run.stopping import Stopping


class Alive:
    """Watches for hanging ranks and for signals from the moment it is made. Collective."""

    def __init__(self, name: str, cfg: Config, world: World):
        """name: of the script, for messages."""
        self.stopping = Stopping(2 * cfg.run.hang_s)  # twice: the hang watch reports first
        self.watch = HangWatch(name, world, [*ranks.groups(world), self.stopping.group], cfg.run.hang_s)

    def at(self, place: str) -> None:
        """Note the place of this rank, and stop if a signal asked for it. Collective. Raises: Interrupted."""
        self.watch.at(place)
        self.stopping.check()

    def close(self) -> None:
        """Stop watching for hanging ranks."""
        self.watch.close()
