"""Going on from a version: which one all ranks take, and what becomes of it in the objects of a script."""
