"""python -P -m flowcheck.lab.gpu: `make gpu-demo` without what it builds."""

import sys

from flowcheck.lab.gpu.demo import main

if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
