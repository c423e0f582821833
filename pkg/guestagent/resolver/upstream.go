package resolver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"

	"github.com/miekg/dns"
)

// Upstream asks the resolvers of the guest's network, in order.
type Upstream struct {
	Servers func() []netip.AddrPort
	Dialer  net.Dialer // its Control sets the mark that lets packets pass the firewall
}

// Ask sends the query, retries once, and uses TCP if the answer is too large for
// UDP. It rejects answers to other queries.
func (u *Upstream) Ask(ctx context.Context, name string, qtype uint16) (*dns.Msg, error) {
	servers := u.Servers()
	if len(servers) == 0 {
		return nil, errors.New("the network has no known resolver")
	}
	var last error
	for i := range attempts {
		msg, err := u.ask(ctx, servers[i%len(servers)].String(), name, qtype)
		if err == nil && msg.Rcode != dns.RcodeServerFailure && msg.Rcode != dns.RcodeRefused {
			return msg, nil
		}
		if last = err; err == nil {
			last = fmt.Errorf("resolver answered %s", dns.RcodeToString[msg.Rcode])
		}
	}
	return nil, last
}

func (u *Upstream) ask(ctx context.Context, server, name string, qtype uint16) (*dns.Msg, error) {
	msg, err := u.exchange(ctx, "udp", server, name, qtype)
	if err == nil && msg.Truncated {
		return u.exchange(ctx, "tcp", server, name, qtype)
	}
	return msg, err
}

func (u *Upstream) exchange(ctx context.Context, network, server, name string, qtype uint16) (*dns.Msg, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	question := new(dns.Msg)
	question.SetQuestion(dns.Fqdn(name), qtype)
	question.SetEdns0(1232, false)
	dialer := u.Dialer
	client := dns.Client{Net: network, Timeout: timeout, Dialer: &dialer, UDPSize: 1232}
	// The client drops answers with another id and keeps waiting.
	msg, _, err := client.ExchangeContext(ctx, question, server)
	if err != nil {
		return nil, err
	}
	if !answers(question, msg) {
		return nil, errors.New("the resolver's answer is for another question")
	}
	return msg, nil
}

func answers(question, msg *dns.Msg) bool {
	if !msg.Response || msg.Id != question.Id || len(msg.Question) != 1 {
		return false
	}
	a, b := question.Question[0], msg.Question[0]
	return a.Qtype == b.Qtype && a.Qclass == b.Qclass && strings.EqualFold(a.Name, b.Name)
}
