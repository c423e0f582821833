package gateway

import (
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"
)

// The kinds of Record.
const (
	KindDNS  = "dns"
	KindTCP  = "tcp"
	KindUDP  = "udp"
	KindICMP = "icmp"
	KindLink = "link" // the VM's network card: attached, refused, or frames that a well-behaved guest does not send
	KindLog  = "log"  // the decision log itself: decisions left out
)

// The protocols of a TCP Record.
const (
	protoTLS  = "tls"
	protoHTTP = "http"
	protoSSH  = "ssh"
	protoRaw  = "raw"
)

// Record is one decision. An allowed connection has two: one when it is opened, and one
// with End set when it is over. An allowed connection that could not be established has
// only the second, with the Reason.
type Record struct {
	Time    time.Time  `json:"time"`
	Kind    string     `json:"kind"`
	Proto   string     `json:"proto,omitempty"`
	Name    string     `json:"name,omitempty"`
	Addr    netip.Addr `json:"addr,omitzero"` // address that the guest or the gateway connected to
	Port    uint16     `json:"port,omitempty"`
	Allowed bool       `json:"allowed"`
	Rule    string     `json:"rule,omitempty"`
	Source  string     `json:"source,omitempty"`
	Reason  string     `json:"reason,omitempty"`
	Request string     `json:"request,omitempty"` // a denied HTTP request: its method and URL, without the query

	Conn     uint64        `json:"conn,omitempty"`
	End      bool          `json:"end,omitempty"`
	BytesOut int64         `json:"bytes_out,omitempty"`
	BytesIn  int64         `json:"bytes_in,omitempty"`
	Elapsed  time.Duration `json:"elapsed,omitempty"` // nanoseconds
}

// Stats holds counters since New. Open, Names and Attached describe the current state.
type Stats struct {
	FramesIn  uint64            `json:"frames_in"` // from the guest
	FramesOut uint64            `json:"frames_out"`
	BytesIn   uint64            `json:"bytes_in"`
	BytesOut  uint64            `json:"bytes_out"`
	Dropped   map[string]uint64 `json:"dropped"` // frames by reason
	Allowed   uint64            `json:"allowed"`
	Denied    uint64            `json:"denied"`
	Questions uint64            `json:"questions"` // of DNS
	Open      int               `json:"open"`      // connections of the guest
	Names     int               `json:"names"`     // names that have an address
	Panics    uint64            `json:"panics"`
	Attached  bool              `json:"attached"`
}

// reporter counts decisions and passes them to the log.
type reporter struct {
	log   func(Record)
	stats struct{ allowed, denied, questions, panics atomic.Uint64 }
}

// Stats returns the counters.
func (g *Gateway) Stats() Stats {
	s := Stats{
		Allowed: g.stats.allowed.Load(), Denied: g.stats.denied.Load(),
		Questions: g.stats.questions.Load(), Panics: g.stats.panics.Load(),
		Open: g.conns.len(), Names: g.names.len(), Dropped: map[string]uint64{},
	}
	g.nic.count(&s)
	return s
}

// report counts a decision and passes it to the log.
func (r *reporter) report(d Record) {
	switch {
	case d.Kind == KindLink:
	case !d.Allowed:
		r.stats.denied.Add(1)
	case !d.End:
		r.stats.allowed.Add(1)
	}
	if r.log != nil {
		d.Time = time.Now()
		r.log(d)
	}
}

// recoverPanic recovers from a panic, so that a bug in handling one packet or connection
// does not end the VM's network. The resources of the code that it protects are closed
// by that code's own defers.
func (r *reporter) recoverPanic() {
	if cause := recover(); cause != nil {
		r.stats.panics.Add(1)
		r.report(Record{Kind: KindLink, Reason: clean(fmt.Sprintf("internal error: %v", cause))})
	}
}

// clean makes text that may contain guest input safe for a log and a terminal.
func clean(s string) string {
	const limit = 300
	if len(s) > limit {
		s = s[:limit]
	}
	return strings.Map(func(r rune) rune {
		if r < 0x20 || r == 0x7f || r >= 0x80 && r < 0xa0 || r == utf8.RuneError {
			return '?'
		}
		return r
	}, s)
}

// limiter suppresses messages that were already reported within the last limiterPause.
// A guest can send a million packets a second; one line says as much.
type limiter struct {
	mu         sync.Mutex
	lastReport map[string]time.Time
}

const (
	limiterPause = 10 * time.Second
	limiterSize  = 512
)

func (l *limiter) ok(what string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if at, ok := l.lastReport[what]; ok && now.Sub(at) < limiterPause {
		return false
	}
	if l.lastReport == nil {
		l.lastReport = map[string]time.Time{}
	}
	if len(l.lastReport) >= limiterSize {
		for what, at := range l.lastReport {
			if now.Sub(at) >= limiterPause {
				delete(l.lastReport, what)
			}
		}
		if len(l.lastReport) >= limiterSize {
			return false
		}
	}
	l.lastReport[what] = now
	return true
}
