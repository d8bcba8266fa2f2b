"""Where the references of seen samples live."""

from thinwire.store.background import Background
from thinwire.store.held import Held, signed, unsigned
from thinwire.store.lock import FolderInUseError, FolderLock, is_held
from thinwire.store.plan import Members, StepVisits, Visit, plan_step
from thinwire.store.references import ReferenceStore
from thinwire.store.slots import SlotFiles
from thinwire.store.tier import Tier

__all__ = [
    "Background",
    "FolderInUseError",
    "FolderLock",
    "Held",
    "Members",
    "ReferenceStore",
    "SlotFiles",
    "StepVisits",
    "Tier",
    "Visit",
    "is_held",
    "plan_step",
    "signed",
    "unsigned",
]
