"""The interfaces of other systems, so that scripts written for them run unchanged. Leaves: nothing in the package uses them."""
