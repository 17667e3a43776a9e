"""How many gradients may be in flight at once."""

from __future__ import annotations

from spillway_trainer.optimizer_offload.gradients import GradientWindow
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.lanes import Done


class Watched(Done):
    """Tells when somebody waits for it."""

    was_waited_for = False

    def wait(self) -> None:
        self.was_waited_for = True


def test_a_gradient_waits_for_an_older_one_only_where_both_do_not_fit() -> None:
    ledger, reads = DeviceLedger(None), [Watched() for _ in range(3)]
    window = GradientWindow(ledger, 10)
    for nbytes, read in zip((5, 5, 1), reads, strict=True):
        window.admit(nbytes)
        window.add(nbytes, [read])
        if read is reads[1]:
            assert not reads[0].was_waited_for
    assert [read.was_waited_for for read in reads] == [True, False, False]
    assert ledger.held_bytes == 6
