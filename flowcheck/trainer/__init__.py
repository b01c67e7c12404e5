"""What runs inside somebody's training job: attach and the description of live objects.

Torch and the standard library.
"""
