"""What the machine can do to a run: power cuts, full and failing disks, a network that goes away, processes that stand still."""
