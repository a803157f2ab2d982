"""All-to-all by push: stores into the peers' memory, and a full signal for each part. For larger messages.

``collectives.push`` has the protocol and the kernels: segment k of x goes to rank k, segment k of out comes
from it.
"""

from .. import push

KERNELS = push.push_kernels(personalized=True)


class Push(push.Push):
    """The method "push" of ``AllToAll``."""

    name, personalized, kernels = "all_to_all.push", True, KERNELS

    def prepare(self, max_nbytes):
        self.world.check_reach("all_to_all push")
        super().prepare(max_nbytes)


GPU_KERNELS = push.gpu_kernels("push_all_to_all", KERNELS)
