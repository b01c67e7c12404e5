"""The feed (design 14): gradients as an optimizer reads them, sent to a node that keeps a log of them."""
