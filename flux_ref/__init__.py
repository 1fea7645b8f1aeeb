"""Set before torch is imported: threads that wait for each other sleep. By default OpenMP's threads spin, and a second
job on the machine then slows a step several times over.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
