"""A client's request on its way through the router: dispatch, retries, relay of the answer."""
