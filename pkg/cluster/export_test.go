package cluster

import "context"

// Peers returns the names of the servers that a core is connected to.
func (c *Core) Peers() (map[string]bool, error) {
	names := map[string]bool{}
	routes, err := c.server.Load().Routez(nil)
	if err == nil {
		for _, r := range routes.Routes {
			names[r.RemoteName] = true
		}
	}
	return names, err
}

func (n *Node) Refresh(ctx context.Context) error { return n.refresh(ctx) }

func (n *Node) Tidy(ctx context.Context) error { return n.tidy(ctx) }

// TakeSlots takes slots for hosts, and returns for how many it succeeds.
func TakeSlots(all, each int, hosts ...string) (taken int) {
	s := slots{all: all, each: each}
	for _, h := range hosts {
		if s.take(h) {
			taken++
		}
	}
	return taken
}

// CoreFailed reports whether the server of a core could not write to its disk.
func (n *Node) CoreFailed() bool { return n.core.Failed() }
