"""Names of what the state machine counts and knows: the enums of parser/include/machine.h, in their order."""

__all__ = ["DISAGREEMENTS", "HOPES", "OUTCOMES", "POSITIONS", "TRUSTS"]

#: What became of a packet: fc_outcome.
OUTCOMES = (
    "placed", "compared", "released", "repeated", "control", "other_roce", "not_roce", "truncated", "malformed",
    "fragment", "icrc", "late", "stale", "unanchored", "not_synced", "beyond", "disagreed", "aside", "encapsulated",
    "overload",
)
#: In what a witness disagreed: fc_disagreement, which begins with 1.
DISAGREEMENTS = (
    "", "payload length", "opcode", "RETH length", "RETH address", "immediate", "flag", "CTS address",
    "extra message", "repeated chunk", "made anew",
)
#: What is known of a flow's position, and whether it is trusted: fc_position and fc_trust.
POSITIONS = ("UNSEEN", "MID_STREAM", "COUNTED", "ADRIFT")
TRUSTS = ("TRUSTED", "LOST", "ON_TRIAL", "LOST_FOR_GOOD")
#: May something that is missing still come: fc_hope.
HOPES = ("may_come", "all_came", "acknowledged", "passed")
