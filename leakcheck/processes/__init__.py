"""An engine in several processes: an agent in each judges there, and this process makes one judgement of them."""
