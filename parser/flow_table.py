"""What a look at all flows finds: a row for each flow of each stream, without an object for any of them.

    table = engine.flows()                  FLOW array (streams, flows)
    table["packets"][stream, flow]
"""

import numpy as np

__all__ = ["FLOW"]

#: anchored: a witness has agreed with its count. trusted: no witness has disagreed since it was last trusted. adrift:
#: it lost its place in an outage and has not found it again. ignored_from, ignored_until: iterations that it brought
#: nothing to, because it was not trusted (equal: none). gaps: PSNs of data that were skipped and have not come so far.
FLOW = np.dtype([
    (name, np.int64) for name in (
        "packets", "anchored", "trusted", "adrift", "ignored_from", "ignored_until", "gaps", "duplicates",
    )
])
