// Command client loads the network of the guest that it runs in, and prints the
// results as JSON. Its arguments are the resolver's address, how long to measure each
// figure, and how long to wait for a connection.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/test/bench/load"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 3 {
		return errors.New("usage: client RESOLVER:PORT TIME GIVEUP")
	}
	resolver, err := netip.ParseAddrPort(args[0])
	if err != nil {
		return err
	}
	each, err := time.ParseDuration(args[1])
	if err != nil {
		return err
	}
	giveUp, err := time.ParseDuration(args[2])
	if err != nil {
		return err
	}
	n := load.Network{Resolver: resolver, GiveUp: giveUp, Dial: func(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, to.String())
	}}
	r, err := n.Run(context.Background(), each)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(r)
}
