package servecmd

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fleet"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/server"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

const (
	clusterPort = 7422             // of a core, for hosts; the next one is for cores, the one after it for the witness
	joinTimeout = 30 * time.Second // for a core to admit this host
	maxToken    = 16 << 10         // bytes
)

// enter founds or joins a cluster, as the flags say.
func (o serveOptions) enter(ctx context.Context, a *app.App, e ops.Engine) error {
	if !o.found && o.join == "" {
		if o.name != "" || o.address != "" {
			return fail.New(fail.Usage, "--name and --cluster-address are for --cluster and --join").WithHint("agent-sessionizer serve --help")
		}
		return nil
	}
	paths := e.Tasks.Sessions.Config.Paths
	if err := server.CheckStopped(paths); err != nil { // it would not notice
		return err
	}
	dir := paths.Cluster()
	name, err := o.hostName()
	if err != nil {
		return err
	}
	record := func() {
		a.AuditTo(a.Config)(ctx, audit.Record{Type: audit.HostJoined, Actor: app.Actor(), Resource: "host:" + name, Outcome: audit.Success})
	}
	if o.found {
		listen, route, witness, err := o.addresses(name)
		if err != nil {
			return err
		}
		if s, err := cluster.LoadState(dir); err == nil && s.Role.Allows(cluster.CoreOf) {
			return nil // a unit starts it with the same flags each time
		}
		if _, err := cluster.Found(dir, name, name, listen, route, witness, externalOf(e)); err != nil {
			return err
		}
		record()
		return nil
	}
	text, err := readToken(o.join, os.Stdin)
	if err != nil {
		return err
	}
	t, err := cluster.ParseToken(text)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, joinTimeout)
	defer cancel()
	is := cluster.Applicant{Name: name}
	if o.address != "" || t.Role.Allows(cluster.CoreOf) {
		if is.Addr, is.Route, _, err = o.addresses(name); err != nil {
			return err
		}
	}
	if _, err := cluster.Join(ctx, dir, t, is, externalOf(e)); err != nil {
		return err
	}
	record()
	return nil
}

// externalOf returns the NATS cluster that the settings name, or nil.
func externalOf(e ops.Engine) *cluster.External {
	c := e.Tasks.Sessions.Config.Cluster
	if c.URL == "" {
		return nil
	}
	return &cluster.External{URL: c.URL, Domain: c.Domain, Credentials: string(c.Credentials), CA: string(c.CA)}
}

// hostName returns the name of this host in its cluster.
func (o serveOptions) hostName() (string, error) {
	name := o.name
	if name == "" {
		host, err := os.Hostname()
		if err != nil {
			return "", fail.New(fail.Host, "find the name of this host: %w", err).WithHint("agent-sessionizer serve --name NAME")
		}
		name, _, _ = strings.Cut(strings.ToLower(host), ".")
	}
	return name, cluster.CheckName(name)
}

// addresses returns where a core listens: for hosts, for other cores, and its witness.
func (o serveOptions) addresses(name string) (listen, route, witness string, err error) {
	listen = cmp.Or(o.address, net.JoinHostPort(name, strconv.Itoa(clusterPort)))
	host, text, err := net.SplitHostPort(listen)
	port, perr := strconv.ParseUint(text, 10, 16)
	if err != nil || perr != nil || host == "" || port == 0 || port > 65533 {
		return "", "", "", fail.New(fail.Usage, "--cluster-address must be ADDRESS:PORT, with a port up to 65533, got %q", listen).
			WithHint("agent-sessionizer serve --cluster --cluster-address 192.0.2.1:%d", clusterPort)
	}
	at := func(host string, port uint64) string { return net.JoinHostPort(host, strconv.FormatUint(port, 10)) }
	return listen, at(host, port+1), at("127.0.0.1", port+2), nil
}

// readToken reads the token of a cluster. An argument would show it to other users of this host.
func readToken(name string, stdin io.Reader) (string, error) {
	if strings.HasPrefix(name, "asz1.") {
		return "", fail.New(fail.Usage, "--join takes the name of a file, because other users of this host can see arguments").
			WithHint("agent-sessionizer serve --join - # and paste the token")
	}
	in := stdin
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return "", fail.New(fail.Usage, "read the token: %w", err)
		}
		defer f.Close()
		in = f
	}
	line := make([]byte, 0, 512)
	for one := make([]byte, 1); len(line) < maxToken; { // no further: a terminal stays open
		n, err := in.Read(one)
		if n > 0 && one[0] == '\n' {
			break
		}
		line = append(line, one[:n]...)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return "", fail.New(fail.Usage, "read the token: %w", err)
		}
	}
	return string(line), nil
}

// partOf returns this host's part in its cluster; nil if it belongs to none.
func partOf(ctx context.Context, e ops.Engine) (*fleet.Part, error) {
	dir := e.Tasks.Sessions.Config.Paths.Cluster()
	state, err := cluster.LoadState(dir)
	if errors.Is(err, cluster.ErrNone) || err == nil && state.Certificate == "" { // a token that was not accepted
		return nil, nil //nolint:nilnil // no cluster
	}
	if err != nil {
		return nil, err
	}
	if err := state.SetExternal(dir, externalOf(e)); err != nil {
		return nil, err
	}
	accel := ""
	if d, err := e.Driver(); err == nil {
		if is, err := d.Accel(ctx, vm.HostArch()); err == nil {
			accel = is.Name
		}
	}
	if _, err := e.Tasks.Sessions.Store.Incarnation(ctx); err != nil { // from now on, tasks are for the cluster
		return nil, err
	}
	p := fleet.NewPart(dir, state)
	p.Tasks, p.Log, p.Version, p.Accel = e.Tasks, e.Log, app.Version, accel
	p.Images = func() (names []string) {
		all, err := e.Images.List()
		if err != nil {
			return nil
		}
		for _, i := range all {
			if i.Ready && i.Path != "" {
				names = append(names, i.Name)
			}
		}
		return names
	}
	return p, nil
}
