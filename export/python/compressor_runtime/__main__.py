"""Generate text from a bundle.

Bundles have a copy of this file beside the package, as compressor_runtime.py: ``python compressor_runtime.py --prompt
"Once upon"``.  The package comes before a file of its name, so the copy imports the package, not itself.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.dont_write_bytecode = True  # nothing is added to the bundle

from compressor_runtime import main

if __name__ == "__main__":
    sys.exit(main())
