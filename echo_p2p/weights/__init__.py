"""Policy weights as signed releases: lossless patches, a content-addressed store, publishing and fetching."""
