package netcmd

import (
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
)

// TestEntryLine checks, among others, that the line of an allowed connection that failed
// states the reason.
func TestEntryLine(t *testing.T) {
	tcp := gateway.Record{Kind: gateway.KindTCP, Proto: "tls", Name: "a.example", Port: 443, Allowed: true, Rule: "a.example", Source: "list:1"}
	ended := tcp
	ended.End, ended.BytesOut, ended.BytesIn, ended.Elapsed = true, 1024, 2048, time.Second
	cut := ended
	cut.Reason = "denied by now"
	failed := gateway.Record{Kind: gateway.KindTCP, Proto: "tls", Name: "a.example", Port: 443, Allowed: true, End: true, Reason: "resolve: no such host"}
	for _, c := range []struct {
		entry gateway.Entry
		want  string
	}{
		{gateway.Entry{Record: tcp}, "allowed  tls   a.example:443  a.example (list:1)"},
		{gateway.Entry{Record: ended}, "closed   tls   a.example:443  1KiB out, 2KiB in, 1s"},
		{gateway.Entry{Record: cut}, "closed   tls   a.example:443  1KiB out, 2KiB in, 1s: denied by now"},
		{gateway.Entry{Record: failed}, "closed   tls   a.example:443  resolve: no such host"},
		{gateway.Entry{Record: gateway.Record{Kind: gateway.KindLink, Allowed: true, End: true, Reason: "VM disconnected"}}, "closed   link  -  VM disconnected"},
		{gateway.Entry{Count: 3, Record: gateway.Record{Kind: gateway.KindDNS, Name: "b.example", Port: 53, Reason: "not listed"}}, "denied   dns   b.example  not listed ×3"},
	} {
		if _, got, _ := strings.Cut(entryLine(c.entry), "  "); got != c.want {
			t.Errorf("entryLine(%+v) = %q after the time, want %q", c.entry, got, c.want)
		}
	}
}
