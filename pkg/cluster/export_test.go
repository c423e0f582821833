package cluster

import "context"

func (n *Node) Refresh(ctx context.Context) error { return n.refresh(ctx) }

func (n *Node) Tidy(ctx context.Context) error { return n.tidy(ctx) }
