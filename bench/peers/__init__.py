"""The peers' side, each run by an interpreter that has the peer; sizes where a peer lets us."""
