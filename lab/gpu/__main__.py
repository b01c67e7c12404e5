"""python -P -m lab.gpu: `make gpu-demo` without what it builds."""

import sys

from lab.gpu.demo import main

if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
