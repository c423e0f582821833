package resolver

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

// BenchmarkAtOnce measures a cached answer and a denied name, with a list of ten
// thousand names.
func BenchmarkAtOnce(b *testing.B) {
	pol := policy.Default()
	for i := range 10_000 {
		pol.Names = append(pol.Names, policy.Rule{Pattern: fmt.Sprintf("host%d.ok.example", i), Source: "bench"})
	}
	now := time.Now()
	for what, name := range map[string]string{"listed": "host77.ok.example.", "denied": "evil.example."} {
		b.Run(what, func(b *testing.B) {
			p := &Proxy{Policy: func() *policy.Policy { return pol }, Log: func(guestproto.Query) {}, now: func() time.Time {
				now = now.Add(time.Millisecond) // within the limit of one source
				return now
			}}
			p.once.Do(p.setup)
			m := new(dns.Msg)
			m.SetQuestion(name, dns.TypeA)
			packed, err := m.Pack()
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for b.Loop() {
				p.cache.put("host77.ok.example", dns.TypeA, found(60, 1))
				if p.atOnce(packed, netip.MustParseAddrPort("127.0.0.1:5353")) == nil {
					b.Fatalf("atOnce(%s) = nil, want an answer", name)
				}
			}
		})
	}
}
