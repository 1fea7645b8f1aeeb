import os

# Threads that spin while they wait for work take the cores from the reading threads. Set before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
