"""From RoCEv2 packets to gradient bytes: headers, ICRC, NCCL's wire model, the state machine, the arena."""
