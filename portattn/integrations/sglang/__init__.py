"""portattn as an attention backend of SGLang: `--attention-backend portattn`.

SGLang finds `activate` by the entry point `sglang.srt.plugins` and calls it in each of its processes: nothing is to be
imported or called by hand. docs/sglang.md lists what is served and what is refused.
"""

from portattn.integrations.sglang.names import NAME, NEWEST, OLDEST
from portattn.integrations.sglang.plugin import activate

__all__ = ["NAME", "NEWEST", "OLDEST", "activate"]
