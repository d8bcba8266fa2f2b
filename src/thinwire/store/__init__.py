"""Where the references of seen samples live."""

from thinwire.store.memory import Held, MemoryStore
from thinwire.store.plan import Visit, plan_step

__all__ = ["Held", "MemoryStore", "Visit", "plan_step"]
