"""Who may connect to a node's ports, before anybody has shown who he is.

    waiting_room.py    connections that have shown nothing: how many, of one address and of all, and which one goes
    files.py           how many of them the process has descriptors for
    gate.py            the control port: one thread takes connections in until they have proved the token
    http_door.py       the HTTP API: the same for asyncio, and a place of their own for those that have shown a key

A stranger never has the place of one who is known: they are counted apart. Where no room is left for another
stranger, the one that has been silent for longest goes. So whoever answers at once gets in, however many say nothing.
"""
