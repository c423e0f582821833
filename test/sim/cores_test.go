//go:build sim

package sim

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fleet"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

const coreCommand = "core"

// runCore runs a core: the cluster's part of serve, on a host that takes no task. It ends
// with its input.
func runCore(ctx context.Context, args []string) error {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // until the test ends
		cancel()
	}()
	dir, log := args[0], slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	s, err := store.Open(ctx, filepath.Join(dir, "store.db"))
	if err != nil {
		return err
	}
	defer s.Close()
	n, err := cluster.Start(ctx, dir, slog.New(slog.DiscardHandler)) // the server logs each login that is too early
	if err != nil {
		return err
	}
	defer n.Close()
	name := n.State.Name
	host := fleet.Host{
		Tasks: &fleet.Tasks{Name: name, Tasks: n.Tasks, Entries: n.Entries, Queue: n.Queue, Store: s, Log: log, Outputs: noFiles}, Hosts: n.Hosts, Core: true, Log: log,
		Describe: func(context.Context) (cluster.Host, error) {
			return cluster.Host{Name: name, Drained: true}, nil
		},
		Wake:    func(context.Context) error { return nil },
		Abandon: func(context.Context, []string) error { return nil },
	}
	var all sync.WaitGroup
	all.Go(func() { host.Serve(ctx) })
	all.Go(func() {
		if err := n.Serve(ctx); err != nil {
			log.Error("failed to follow the cluster", "error", err)
		}
	})
	all.Wait()
	return nil
}

// cores are the processes of all cores, and a connection as the first of them.
type cores struct {
	t         *testing.T
	dirs      []string
	pids      []int
	nc        *nats.Conn
	js        jetstream.JetStream
	members   *cluster.Members
	addr      string
	authority []byte
}

func (c *cores) start(dir string) {
	c.t.Helper()
	self, err := os.Executable()
	if err != nil {
		c.t.Fatal(err)
	}
	cmd := exec.Command(self, coreCommand, dir)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		c.t.Fatal(err)
	}
	c.dirs, c.pids = append(c.dirs, dir), append(c.pids, cmd.Process.Pid)
	c.t.Cleanup(func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			c.t.Errorf("core %s: %v", filepath.Base(dir), err)
		}
	})
}

// login connects as the core whose directory it is.
func (c *cores) login(dir string) {
	c.t.Helper()
	s, err := cluster.LoadState(dir)
	if err != nil {
		c.t.Fatal(err)
	}
	keys, err := s.Keys()
	if err != nil {
		c.t.Fatal(err)
	}
	c.addr, c.authority = s.Listen, []byte(s.Authority)
	opts, err := keys.Login(c.authority)
	if err != nil {
		c.t.Fatal(err)
	}
	testenv.WaitFor(c.t, "the first core", func() bool {
		c.nc, err = nats.Connect("tls://"+s.Listen, append(opts, nats.MaxReconnects(-1))...)
		return err == nil
	})
	c.t.Cleanup(c.nc.Close)
	if c.js, err = jetstream.New(c.nc); err != nil {
		c.t.Fatal(err)
	}
	authority, err := cluster.DecodeAuthority([]byte(s.Signing))
	if err != nil {
		c.t.Fatal(err)
	}
	testenv.WaitFor(c.t, "the members of the cluster", func() bool {
		c.members, err = cluster.OpenMembers(c.t.Context(), c.js, s.Name, 1, authority)
		return err == nil
	})
}

// join makes a host a member. A core needs a moment until it accepts a new token.
func (c *cores) join(dir string, role cluster.Role, is cluster.Applicant) error {
	token, invitation, err := cluster.NewToken([]string{c.addr}, c.authority, role, time.Hour)
	if err == nil {
		err = c.members.Invite(c.t.Context(), invitation)
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(c.t.Context(), 5*time.Minute)
	defer cancel()
	for {
		_, err := cluster.Join(ctx, dir, token, is, nil)
		if err == nil || ctx.Err() != nil {
			return err
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// spread reports whether the log of tasks and the queue have copies on all cores.
func (c *cores) spread() bool {
	for _, name := range []string{"TASKS", "QUEUE", "HOSTS", "MEMBERS"} {
		s, err := c.js.Stream(c.t.Context(), name)
		if err != nil || s.CachedInfo().Config.Replicas < len(c.dirs) || s.CachedInfo().Cluster == nil {
			return false
		}
		for _, r := range s.CachedInfo().Cluster.Replicas {
			if !r.Current {
				return false
			}
		}
	}
	return true
}

// usage is what the cores have used until a moment.
type usage struct {
	at        time.Duration // or the time that passed
	cpu       time.Duration // of all cores
	hosts     time.Duration // CPU time of the process that has all hosts
	disk      int64         // bytes of the streams of one core
	written   int64         // bytes that the processes wrote to files
	in, out   int64         // messages of hosts to cores, and of cores to hosts
	sent      int64         // bytes of cores to hosts
	requests  int64         // of the API of JetStream
	consumers int
}

func (u usage) since(was usage) usage {
	return usage{
		u.at - was.at, u.cpu - was.cpu, u.hosts - was.hosts, u.disk - was.disk, u.written - was.written, u.in - was.in, u.out - was.out, u.sent - was.sent,
		u.requests - was.requests, u.consumers,
	}
}

// beyond returns what was used beyond what an idle fleet uses in the same time.
func (u usage) beyond(idle usage) usage {
	scale := u.at.Seconds() / idle.at.Seconds()
	of := func(n int64) int64 { return int64(scale * float64(n)) }
	time := func(d time.Duration) time.Duration { return time.Duration(of(int64(d))) }
	return usage{
		u.at, u.cpu - time(idle.cpu), u.hosts - time(idle.hosts), u.disk, u.written - of(idle.written), u.in - of(idle.in), u.out - of(idle.out), u.sent - of(idle.sent),
		u.requests - of(idle.requests), u.consumers,
	}
}

func (u usage) String() string {
	s := u.at.Seconds()
	return fmt.Sprintf("%.1f s: %.0f %% of a CPU, %.1f kB/s to the disk, %.0f messages/s in, %.0f out with %.0f kB/s, %.0f API requests/s, %d consumers",
		s, 100*u.cpu.Seconds()/s, float64(u.written)/s/1e3, float64(u.in)/s, float64(u.out)/s, float64(u.sent)/s/1e3, float64(u.requests)/s, u.consumers)
}

var testBegan = time.Now()

// usage reads the counters of the cores' processes and servers.
func (c *cores) usage(t *testing.T) usage {
	t.Helper()
	u := usage{at: time.Since(testBegan), hosts: processTime(t, os.Getpid())}
	for _, pid := range c.pids {
		u.cpu += processTime(t, pid)
		u.written += field(t, fmt.Sprintf("/proc/%d/io", pid), "write_bytes")
	}
	u.disk = tree(t, filepath.Join(c.dirs[0], "streams"))
	a, err := c.js.AccountInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	u.requests, u.consumers = int64(a.API.Total), a.Consumers
	c.traffic(t, &u)
	return u
}

// traffic asks the servers for the account's messages.
func (c *cores) traffic(t *testing.T, u *usage) {
	t.Helper()
	inbox := c.nc.NewInbox()
	answers, err := c.nc.SubscribeSync(inbox)
	if err == nil {
		err = c.nc.PublishRequest("$SYS.REQ.ACCOUNT.PING.STATZ", inbox, nil)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer answers.Unsubscribe()
	type count struct{ Msgs, Bytes int64 }
	for wait := 5 * time.Second; ; wait = 500 * time.Millisecond {
		m, err := answers.NextMsg(wait)
		if err != nil {
			if wait > time.Second {
				t.Fatalf("counters of the servers: %v", err)
			}
			return
		}
		var is struct {
			Data struct {
				Accounts []struct{ Sent, Received count } `json:"account_statz"`
			} `json:"data"`
		}
		if err := json.Unmarshal(m.Data, &is); err != nil {
			t.Fatal(err)
		}
		for _, a := range is.Data.Accounts {
			u.in += a.Received.Msgs
			u.out += a.Sent.Msgs
			u.sent += a.Sent.Bytes
		}
	}
}

// processTime returns the CPU time of a process.
func processTime(t *testing.T, pid int) time.Duration {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	words := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	var ticks int64
	for _, word := range words[11:13] { // utime and stime
		n, err := strconv.ParseInt(word, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		ticks += n
	}
	return time.Duration(ticks) * time.Second / 100
}

// field returns a number of a file of /proc.
func field(t *testing.T, file, name string) int64 {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if key, value, ok := strings.Cut(line, ":"); ok && key == name {
			n, err := strconv.ParseInt(strings.Fields(value)[0], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatalf("%s: no %s", file, name)
	return 0
}

// memory returns the resident memory of the largest core, in bytes.
func (c *cores) memory(t *testing.T) (most int64) {
	t.Helper()
	for _, pid := range c.pids {
		most = max(most, 1024*field(t, fmt.Sprintf("/proc/%d/status", pid), "VmRSS"))
	}
	return most
}

// tree returns the size of all files of a directory.
func tree(t *testing.T, dir string) (size int64) {
	t.Helper()
	if err := filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return nil //nolint:nilerr // a file may be replaced meanwhile
		}
		if info, err := e.Info(); err == nil {
			size += info.Size()
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return size
}

// logged is what the log has about the tasks.
type logged struct {
	entries int
	bytes   int64
	idle    []time.Duration // from the submission to the claim, of tasks for which a host had room; sorted
	claims  float64         // per second, of the middle 90 % of those that waited
	tail    time.Duration   // from then to the last claim
}

// readLog reads the whole log, and checks that each task was claimed once and has ended well. While
// the tasks from, up to to, were submitted, hosts had room.
func (c *cores) readLog(t *testing.T, ids []string, from, to int) (l logged) {
	t.Helper()
	order := map[string]int{}
	for i, id := range ids {
		order[id] = i
	}
	stream, err := c.js.Stream(t.Context(), "TASKS")
	if err != nil {
		t.Fatal(err)
	}
	consumer, err := stream.OrderedConsumer(t.Context(), jetstream.OrderedConsumerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	all, err := consumer.Messages()
	if err != nil {
		t.Fatal(err)
	}
	defer all.Stop()
	submitted, claimed, completed := map[string]time.Time{}, map[string]int{}, map[string]bool{}
	var claims []time.Time
	for left := stream.CachedInfo().State.Msgs; left > 0; left-- {
		m, err := all.Next()
		if err != nil {
			t.Fatal(err)
		}
		meta, err := m.Metadata()
		if err != nil {
			t.Fatal(err)
		}
		var is struct {
			Body struct {
				Kind cluster.Kind
				Data struct{ Row store.Task }
			}
		}
		if err := json.Unmarshal(m.Data(), &is); err != nil {
			t.Fatal(err)
		}
		id := strings.TrimPrefix(m.Subject(), "task.")
		l.entries++
		l.bytes += int64(len(m.Data()))
		switch is.Body.Kind {
		case cluster.Submitted:
			submitted[id] = meta.Timestamp
		case cluster.Claimed:
			claimed[id]++
			i := order[id]
			if i >= to || to == len(ids) {
				claims = append(claims, meta.Timestamp)
			}
			if i >= from && i < to {
				l.idle = append(l.idle, meta.Timestamp.Sub(submitted[id]))
			}
		case cluster.Reported:
			completed[id] = is.Body.Data.Row.Phase == string(task.Completed)
		}
	}
	for _, id := range ids {
		if claimed[id] != 1 || !completed[id] {
			t.Errorf("task %s: claims = %d, completed = %t, want one and true", id, claimed[id], completed[id])
		}
	}
	if len(submitted) != len(ids) {
		t.Errorf("submitted tasks in the log = %d, want %d", len(submitted), len(ids))
	}
	l.idle = sorted(l.idle)
	if n := len(claims); n > 1 { // the log is ordered by time
		from, to := n/20, n-1-n/20
		l.claims = float64(to-from) / claims[to].Sub(claims[from]).Seconds()
		l.tail = claims[n-1].Sub(claims[to])
	}
	return l
}
