package resolver

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/miekg/dns"
)

func found(ttl uint32, records int) answer {
	a := answer{ttl: ttl}
	for range records {
		a.records = append(a.records, &dns.A{A: netip.MustParseAddr("203.0.113.1").AsSlice()})
	}
	return a
}

func TestCacheKeepsAnAnswerForItsTime(t *testing.T) {
	now := time.Now()
	c := newCache(func() time.Time { return now })
	c.put("ok.example", dns.TypeA, found(60, 1))
	for after, ttl := range map[time.Duration]uint32{0: 60, 500 * time.Millisecond: 60, 59 * time.Second: 1, 59*time.Second + 900*time.Millisecond: 1} {
		began := now
		now = now.Add(after)
		if a, ok := c.get("ok.example", dns.TypeA); !ok || a.ttl != ttl || len(a.records) != 1 {
			t.Errorf("get() after %v = %+v, %v, want one record with a TTL of %d", after, a, ok, ttl)
		}
		now = began
	}
	if a, ok := c.get("ok.example", dns.TypeAAAA); ok {
		t.Errorf("get() of another type = %+v, want none", a)
	}
	now = now.Add(time.Minute)
	if a, ok := c.get("ok.example", dns.TypeA); ok || len(c.answers) > 0 {
		t.Errorf("get() after its TTL = %+v, %t, %d answers in the cache, want none", a, ok, len(c.answers))
	}
	c.put("ok.example", dns.TypeA, found(1<<31, 1))
	if now = now.Add(maxTTL * time.Second); len(c.answers) != 1 {
		t.Fatalf("%d answers in the cache, want 1", len(c.answers))
	} else if a, ok := c.get("ok.example", dns.TypeA); ok {
		t.Errorf("get() after %d seconds = %+v, want none", maxTTL, a)
	}
}

func TestCacheKeepsOnlyGoodAnswersAndFew(t *testing.T) {
	c := newCache(time.Now)
	for what, a := range map[string]answer{
		"a name that does not exist": {rcode: dns.RcodeNameError, ttl: 60}, "nothing of this type": {ttl: 60},
		"no time": found(0, 1), "many records": found(60, maxCachedRecords+1),
	} {
		c.put("ok.example", dns.TypeA, a)
		if len(c.answers) > 0 {
			t.Errorf("%s: %d answers in the cache, want 0", what, len(c.answers))
		}
	}
	for i := range maxCached + 10 {
		c.put(fmt.Sprint(i), dns.TypeA, found(60, 1))
	}
	if _, ok := c.get(fmt.Sprint(maxCached+9), dns.TypeA); !ok || len(c.answers) != maxCached {
		t.Errorf("%d answers in the cache, the last of them: %t, want %d, true", len(c.answers), ok, maxCached)
	}
}

func TestLimiterGivesBack(t *testing.T) {
	now := time.Now()
	l := newLimiter(func() time.Time { return now })
	from := netip.MustParseAddr("127.0.0.1")
	for l.allow(from) {
	}
	l.giveBack(from)
	if first, second := l.allow(from), l.allow(from); !first || second {
		t.Errorf("allow() twice after one was given back = %t, %t, want true, false", first, second)
	}
	l.giveBack(netip.MustParseAddr("127.0.0.2")) // was never here
	for range 3 * int(burst) {
		l.giveBack(from)
	}
	n := 0
	for l.allow(from) {
		n++
	}
	if n != int(burst) {
		t.Errorf("%d questions are allowed after many were given back, want %d", n, int(burst))
	}
}

// Many client addresses and many requested names must not take more memory than a
// few.
func TestMemoryOfClientsIsBounded(t *testing.T) {
	l := newLimiter(time.Now)
	for i := range 3 * maxSources {
		l.allow(netip.AddrFrom4([4]byte{127, 0, byte(i >> 8), byte(i)}))
	}
	if n := len(l.sources); n > maxSources {
		t.Errorf("%d sources are known, want at most %d", n, maxSources)
	}
	p := &Proxy{Who: func(netip.AddrPort, string) string { return "curl" }}
	p.once.Do(p.setup)
	for i := range 3 * maxPrograms {
		p.clientProgram(netip.AddrPort{}, fmt.Sprint(i), true)
	}
	if n := len(p.programs); n > maxPrograms {
		t.Errorf("the programs of %d names are known, want at most %d", n, maxPrograms)
	}
	msg := new(dns.Msg)
	for range 10 * maxRecords {
		msg.Answer = append(msg.Answer, &dns.A{Hdr: dns.RR_Header{Name: "a.example.", Rrtype: dns.TypeA, Class: dns.ClassINET}})
	}
	var a answer
	if _, err := a.walk(msg, "a.example", dns.TypeA); err != nil || len(a.records) != maxRecords {
		t.Errorf("walk() = %d records, %v, want %d", len(a.records), err, maxRecords)
	}
}
