"""Where the references of seen samples live."""

from thinwire.store.memory import MemoryStore
from thinwire.store.plan import Visit, plan_step

__all__ = ["MemoryStore", "Visit", "plan_step"]
