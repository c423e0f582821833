package cluster

import "context"

func (n *Node) Refresh(ctx context.Context) error { return n.refresh(ctx) }
