// Package load loads a network and reports what it carried. A user-space guest and a
// real one run the same code, against the server that is also in this package.
//
// Every byte is checked. What was not carried is counted and never silently retried;
// the numbers cover only what arrived.
package load

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
)

// These are the server's address and the names it is asked for. The number of names
// is that of a large build.
const (
	Zone  = "bench.example."
	Name  = "files." + Zone
	Port  = 7000
	names = 24
)

// Late is longer than any connection takes on an idle cable.
const Late = 5 * time.Second

const (
	workers   = 16               // concurrent connections or questions
	patience  = 60 * time.Second // limit for one connection or transfer, on any machine
	answer    = 5 * time.Second  // limit for one DNS answer
	firstSize = 4 << 20          // size of the transfer that determines the pace
	maxSize   = 8 << 30
)

// Network is how a guest reaches what is outside.
type Network struct {
	Dial     func(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error)
	Resolver netip.AddrPort
	GiveUp   time.Duration // limit for a connection; 0 means a minute
}

// Result is what a network carried.
type Result struct {
	Up          float64 `json:"up"`          // Mbit/s
	Down        float64 `json:"down"`        // Mbit/s
	Connections float64 `json:"connections"` // per second, each with a question and an answer
	Answers     float64 `json:"answers"`     // of DNS, per second
	Made        int     `json:"made"`        // connections
	Late        int     `json:"late"`        // connections that took longer than Late, or failed
	Lost        int     `json:"lost"`        // connections that failed
	Unanswered  int     `json:"unanswered"`  // DNS questions
	Why         string  `json:"why"`         // why the last one was lost
}

// Run measures everything, each for about as long as given.
func (n Network) Run(ctx context.Context, each time.Duration) (r Result, err error) {
	addr, err := n.lookup(ctx)
	if err != nil {
		return r, fmt.Errorf("look %s up: %w", Name, err)
	}
	server := netip.AddrPortFrom(addr, Port)
	if r.Up, err = n.bulk(ctx, server, "up", each); err != nil {
		return r, fmt.Errorf("upload: %w", err)
	}
	if r.Down, err = n.bulk(ctx, server, "down", each); err != nil {
		return r, fmt.Errorf("download: %w", err)
	}
	n.connections(ctx, server, each, &r)
	return r, n.questions(ctx, each, &r)
}

func (n Network) lookup(ctx context.Context) (netip.Addr, error) {
	c, err := n.Dial(ctx, "udp", n.Resolver)
	if err != nil {
		return netip.Addr{}, err
	}
	defer c.Close()
	m := new(dns.Msg)
	m.SetQuestion(Name, dns.TypeA)
	reply, _, err := (&dns.Client{Timeout: patience}).ExchangeWithConnContext(ctx, m, &dns.Conn{Conn: c})
	if err != nil {
		return netip.Addr{}, err
	}
	for _, rr := range reply.Answer {
		if a, ok := rr.(*dns.A); ok {
			if addr, ok := netip.AddrFromSlice(a.A.To4()); ok {
				return addr, nil
			}
		}
	}
	return netip.Addr{}, errors.New(dns.RcodeToString[reply.Rcode])
}

// bulk transfers a little to learn the pace, and then enough for the given time.
func (n Network) bulk(ctx context.Context, server netip.AddrPort, way string, each time.Duration) (float64, error) {
	size := int64(firstSize)
	took, err := n.transfer(ctx, server, way, size)
	if err != nil {
		return 0, err
	}
	size = min(maxSize, max(size, int64(float64(size)*each.Seconds()/took.Seconds())))
	if took, err = n.transfer(ctx, server, way, size); err != nil {
		return 0, err
	}
	return float64(size) * 8 / 1e6 / took.Seconds(), nil
}

// transfer moves size bytes. An upload ends when the server has received all of them.
func (n Network) transfer(ctx context.Context, server netip.AddrPort, way string, size int64) (time.Duration, error) {
	c, err := n.Dial(ctx, "tcp", server)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return 0, err
	}
	began := time.Now()
	if _, err := fmt.Fprintf(c, "%s %d\n", way, size); err != nil {
		return 0, err
	}
	if way == "down" {
		err = check(c, size)
		return time.Since(began), err
	}
	if err := send(c, size); err != nil {
		return 0, err
	}
	said, err := bufio.NewReader(c).ReadString('\n')
	if err == nil && said != "ok\n" {
		err = fmt.Errorf("the server says: %s", said)
	}
	return time.Since(began), err
}

// connections makes connections one after another. Only those that finished in time
// count for the rate: the others are counted, but say nothing about speed.
func (n Network) connections(ctx context.Context, server netip.AddrPort, each time.Duration, r *Result) {
	if n.GiveUp == 0 {
		n.GiveUp = patience
	}
	var inTime, made, late, lost atomic.Int64
	var why atomic.Value
	end := time.Now().Add(each)
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for began := time.Now(); began.Before(end); began = time.Now() {
				if err := n.ping(ctx, server); err != nil {
					late.Add(1)
					lost.Add(1)
					why.Store(err.Error())
					continue
				}
				made.Add(1)
				now := time.Now()
				if now.Before(end) {
					inTime.Add(1)
				}
				if now.Sub(began) > Late {
					late.Add(1)
				}
			}
		})
	}
	wg.Wait()
	r.Made, r.Late, r.Lost = int(made.Load()), int(late.Load()), int(lost.Load())
	r.Connections = float64(inTime.Load()) / each.Seconds()
	r.Why, _ = why.Load().(string)
}

func (n Network) ping(ctx context.Context, server netip.AddrPort) error {
	end := time.Now().Add(n.GiveUp)
	ctx, cancel := context.WithDeadline(ctx, end)
	defer cancel()
	c, err := n.Dial(ctx, "tcp", server)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(end); err != nil {
		return err
	}
	if _, err := io.WriteString(c, "ping\n"); err != nil {
		return err
	}
	said, err := io.ReadAll(c)
	if err == nil && string(said) != "pong\n" {
		err = fmt.Errorf("the server says: %q", said)
	}
	return err
}

// questions asks for allowed names; every worker uses one socket.
func (n Network) questions(ctx context.Context, each time.Duration, r *Result) error {
	var asked []string
	for i := range names {
		asked = append(asked, fmt.Sprintf("n%d.%s", i, Zone))
	}
	a, err := Ask(ctx, Asking{
		Names: asked, Rcode: dns.RcodeSuccess, Workers: workers, Time: each,
		Dial: func(int) (net.Conn, error) { return n.Dial(ctx, "udp", n.Resolver) },
	})
	r.Answers, r.Unanswered = a.Rate, a.Lost
	return err
}

// Asking is a load of questions.
type Asking struct {
	Names   []string
	Rcode   int // required in every answer; a success must have an address
	Workers int
	Time    time.Duration
	Dial    func(worker int) (net.Conn, error)
}

// Answers is what came back.
type Answers struct {
	Rate float64 // per second
	Took []time.Duration
	Lost int
}

// Ask asks for the names in turn, each worker one at a time. A wrong answer is an
// error; a missing one is counted.
func Ask(ctx context.Context, a Asking) (Answers, error) {
	packed := make([][]byte, len(a.Names))
	for i, name := range a.Names {
		m := new(dns.Msg)
		m.SetQuestion(dns.Fqdn(name), dns.TypeA)
		var err error
		if packed[i], err = m.Pack(); err != nil {
			return Answers{}, err
		}
	}
	var next, lost atomic.Int64
	errs := make([]error, a.Workers)
	took := make([][]time.Duration, a.Workers)
	began := time.Now()
	end := began.Add(a.Time)
	var wg sync.WaitGroup
	for w := range a.Workers {
		wg.Go(func() {
			c, err := a.Dial(w)
			if err != nil {
				errs[w] = err
				return
			}
			defer c.Close()
			question, reply := make([]byte, 512), make([]byte, 4096)
			for id := uint16(1); errs[w] == nil && ctx.Err() == nil; id++ {
				start := time.Now()
				if !start.Before(end) {
					return
				}
				q := question[:copy(question, packed[int(next.Add(1))%len(packed)])]
				binary.BigEndian.PutUint16(q, id)
				ok, err := exchange(c, q, reply, a.Rcode)
				switch {
				case err != nil:
					errs[w] = err
				case ok:
					took[w] = append(took[w], time.Since(start))
				default:
					lost.Add(1)
				}
			}
		})
	}
	wg.Wait()
	all := Answers{Lost: int(lost.Load())}
	elapsed := time.Since(began)
	for _, t := range took {
		all.Took = append(all.Took, t...)
	}
	all.Rate = float64(len(all.Took)) / elapsed.Seconds()
	return all, errors.Join(errs...)
}

// exchange reports whether the answer to a packed question came.
func exchange(c net.Conn, question, reply []byte, rcode int) (bool, error) {
	if err := c.SetDeadline(time.Now().Add(answer)); err != nil {
		return false, err
	}
	if _, err := c.Write(question); err != nil {
		return false, err
	}
	for {
		n, err := c.Read(reply)
		var e net.Error
		switch {
		case errors.As(err, &e) && e.Timeout():
			return false, nil
		case err != nil:
			return false, err
		case n < 12 || string(reply[:2]) != string(question[:2]):
			continue // the answer to a question that was given up
		}
		code, answers := int(reply[3]&15), binary.BigEndian.Uint16(reply[6:])
		if code != rcode || rcode == dns.RcodeSuccess && answers == 0 {
			return false, fmt.Errorf("the answer is %s with %d records", dns.RcodeToString[code], answers)
		}
		return true, nil
	}
}
