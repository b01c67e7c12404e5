"""Port mirroring on leaf switches: plan, render to vendor text, apply, read back, remove.

    Topology (file, LLDP)  ->  make_plan()  ->  MirrorPlan  ->  render()  ->  text      no device, no side effect
                                                    |
                                                    `->  Manager(session, transport): diff, apply, show, remove

Imports nothing else of this project. `flowcheck switch` is the command over it; docs/use/switch.md the manual.
"""
