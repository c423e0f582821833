//go:build linux && escape

package main

import (
	"bytes"
	"compress/gzip"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/agent-sessionizer/agent-sessionizer/test/escape/plan"
)

// field is a header field of HTTP/2.
type field struct{ name, value string }

// stream is a request over HTTP/2, with exactly these fields.
type stream struct {
	fields []field
	body   string
	split  int // bytes of each frame with headers
}

func fields(method, host, path, secret string) []field {
	return []field{{":method", method}, {":authority", host}, {":scheme", "https"}, {":path", path}, {"authorization", "Bearer " + value(secret)}}
}

// h2 sends requests over one HTTP/2 connection, and reports the answers.
func (a *attempt) h2(sni string, streams ...stream) {
	c, err := a.tlsClient(sni, 443, &tls.Config{ServerName: sni, NextProtos: []string{"h2"}})
	if err != nil {
		say("h2 %s: %v", sni, err)
		return
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(answerTime)) // the reads report an error
	f := http2.NewFramer(c, c)
	f.AllowIllegalWrites = true
	if _, err := io.WriteString(c, http2.ClientPreface); err != nil {
		say("h2 %s: %v", sni, err)
		return
	}
	if err := f.WriteSettings(); err != nil {
		say("h2 %s: %v", sni, err)
		return
	}
	var block bytes.Buffer
	encoder := hpack.NewEncoder(&block)
	for i, s := range streams {
		block.Reset()
		for _, one := range s.fields {
			_ = encoder.WriteField(hpack.HeaderField{Name: one.name, Value: one.value}) // the buffer takes everything
		}
		text, size := block.Bytes(), s.split
		if size == 0 {
			size = 16000
		}
		id := uint32(2*i + 1)
		first := text[:min(size, len(text))]
		text = text[len(first):]
		err := f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: first, EndHeaders: len(text) == 0, EndStream: s.body == ""})
		for len(text) > 0 && err == nil {
			next := text[:min(size, len(text))]
			text = text[len(next):]
			err = f.WriteContinuation(id, len(text) == 0, next)
		}
		if err == nil && s.body != "" {
			err = f.WriteData(id, true, []byte(s.body))
		}
		if err != nil {
			say("h2 %s: %v", sni, err)
			break
		}
	}
	var heads, body bytes.Buffer
	decoder := hpack.NewDecoder(4096, func(h hpack.HeaderField) { fmt.Fprintf(&heads, "%s: %s\n", h.Name, h.Value) })
	for open := len(streams); open > 0; {
		frame, err := f.ReadFrame()
		if err != nil {
			say("h2 %s: %v", sni, err)
			break
		}
		end := false
		switch frame := frame.(type) {
		case *http2.SettingsFrame:
			if !frame.IsAck() {
				_ = f.WriteSettingsAck() // the next read reports an error
			}
		case *http2.HeadersFrame:
			_, _ = decoder.Write(frame.HeaderBlockFragment()) // what was decoded counts
			end = frame.StreamEnded()
		case *http2.ContinuationFrame:
			_, _ = decoder.Write(frame.HeaderBlockFragment())
		case *http2.DataFrame:
			body.Write(frame.Data())
			end = frame.StreamEnded()
		case *http2.RSTStreamFrame:
			say("h2 %s: reset, %s", sni, frame.ErrCode)
			end = true
		case *http2.GoAwayFrame:
			say("h2 %s: go away, %s %q", sni, frame.ErrCode, frame.DebugData())
			end = true
		}
		if end {
			open--
		}
	}
	say("h2 %s:\n%s\n%s", sni, heads.String(), body.String())
	decode(body.Bytes())
}

// post returns a request with a body.
func post(method, target, host, headers, body string) string {
	return fmt.Sprintf("%s %s HTTP/1.1\r\nHost: %s\r\n%sContent-Length: %d\r\nConnection: close\r\n\r\n%s", method, target, host, headers, len(body), body)
}

// services returns the techniques that use a secret at a host that it is bound to, beyond what the
// request rules or the budget allow.
func services() map[string]func(*attempt) {
	forge := func(method string, targets ...string) func(*attempt) {
		return func(a *attempt) {
			for _, target := range targets {
				a.to(plan.Forge, post(method, target+"?"+a.token, plan.Forge, basic(plan.ForgeKey), "0000"))
			}
		}
	}
	api := func(method, headers string, targets ...string) func(*attempt) {
		return func(a *attempt) {
			for _, target := range targets {
				mark := "?"
				if strings.Contains(target, "?") {
					mark = "&"
				}
				a.to(plan.ForgeAPI, post(method, target+mark+a.token, plan.ForgeAPI, headers+"Content-Type: application/json\r\n"+bearer(plan.ForgeKey), "{}"))
			}
		}
	}
	each := func(all ...func(*attempt)) func(*attempt) {
		return func(a *attempt) {
			for _, one := range all {
				one(a)
			}
		}
	}
	const push = "/git-receive-pack"
	return map[string]func(*attempt){
		"git-push": each(
			forge("POST", "/"+plan.Other+push, "/"+plan.Other+".git"+push, "/"+plan.Project+"-evil"+push, "/acme/"+push[1:], "/"+plan.Other+"/info/lfs/objects/batch"),
			forge("PUT", "/"+plan.Other+"/info/lfs/locks"),
			func(a *attempt) {
				a.h2(plan.Forge, stream{fields: fields("POST", plan.Forge, "/"+plan.Other+push+"?"+a.token, plan.ForgeKey), body: "0000"})
			},
		),
		"git-path": forge("POST",
			"/"+plan.Project+"/../other"+push, "/"+plan.Project+"/%2e%2e/other"+push, "/"+plan.Project+"%2f..%2fother"+push, "/"+plan.Project+"/..%2fother"+push,
			"//"+plan.Other+push, "/"+plan.Other+"//"+push[1:], "/"+plan.Other+"\\..\\widget"+push, "/"+plan.Other+push+"/../../widget"+push, "/"+plan.Other+"%00/"+plan.Project+push,
			"/"+plan.Other+";"+plan.Project+push, "/"+plan.Other+push+"%2f..%2f..%2fwidget"+push, "https://"+plan.Forge+"/"+plan.Other+push, "/"+plan.Other+"%3f/"+plan.Project+push,
			"/ACME/OTHER"+push, "/./"+plan.Other+push, "/"+plan.Other+push+"/", "/"+plan.Other+".git/./"+push[1:], "/"+plan.Other+"%252fwidget"+push,
		),
		"git-smuggle": func(a *attempt) {
			for _, at := range []struct{ host, target, key string }{{plan.Forge, "/" + plan.Project + push, basic(plan.ForgeKey)}, {plan.ForgeAPI, "/markdown", bearer(plan.ForgeKey)}} {
				evil := "POST /" + plan.Other + push + "?" + a.token + " HTTP/1.1\r\nHost: " + at.host + "\r\n" + at.key + "Content-Length: 0\r\nConnection: close\r\n\r\n"
				head := "POST " + at.target + " HTTP/1.1\r\nHost: " + at.host + "\r\n" + at.key
				for _, text := range []string{
					head + "Content-Length: $L\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + evil,
					head + "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n$C\r\n" + evil + "\r\n0\r\n\r\n",
					head + "Content-Length: $L\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + evil,
					head + "Content-Length: $L\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + evil,
					head + "Content-Length: $L\r\nTransfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n" + evil,
					head + "Content-Length: $L\r\nTransfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n" + evil,
					head + "Content-Length: $L\r\nTransfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n" + evil,
					head + "Content-Length: 0\r\nContent-Length: $L\r\n\r\n" + evil,
					head + "Content-Length: +$L\r\n\r\n" + evil,
					head + "Content-Length: 0, $L\r\n\r\n" + evil,
					head + "Transfer-Encoding: chunked\r\n\r\n0;x=\n\r\n" + evil + "0\r\n\r\n",
					head + "Content-Length: 0\r\n\r\n" + evil,
					head + "Content-Length: 4\r\nExpect: 100-continue\r\n\r\n0000" + evil,
					head + "Connection: close, Content-Length\r\nContent-Length: $L\r\n\r\n" + evil,
				} {
					a.to(at.host, lengths(text))
				}
			}
		},
		"git-smuggle-h2": func(a *attempt) {
			evil := "POST /" + plan.Other + push + "?" + a.token + " HTTP/1.1\r\nHost: " + plan.Forge + "\r\n" + basic(plan.ForgeKey) + "Content-Length: 0\r\n\r\n"
			for _, extra := range []field{{"content-length", "0"}, {"transfer-encoding", "chunked"}, {"content-length", "4"}, {"connection", "content-length"}, {"x", "y\r\ncontent-length: 0"}} {
				f := append(fields("POST", plan.Forge, "/"+plan.Project+push, plan.ForgeKey), extra)
				a.h2(plan.Forge, stream{fields: f, body: "0000" + evil})
			}
			// Without the rules, this one suffices.
			a.h2(plan.Forge, stream{fields: fields("POST", plan.Forge, "/"+plan.Other+push+"?"+a.token, plan.ForgeKey), body: "0000"})
		},
		"hub-gist": each(
			api("POST", "", "/gists", "/user/repos", "/orgs/acme/repos", "/user/codespaces", "/user/emails", "/user/migrations", "/markdown/raw"),
			api("PATCH", "", "/gists/1", "/user", "/notifications"), api("PUT", "", "/user/starred/"+plan.Other, "/gists/1/star", "/user/following/evil"),
		),
		"hub-key": each(
			api("POST", "", "/repos/"+plan.Project+"/keys", "/user/keys", "/user/gpg_keys", "/user/ssh_signing_keys", "/repos/"+plan.Project+"/hooks", "/repos/"+plan.Project+"/pages",
				"/repos/"+plan.Project+"/forks", "/repos/"+plan.Project+"/transfer", "/repos/"+plan.Project+"/dispatches", "/repos/"+plan.Project+"/actions/workflows/1/dispatches",
				"/repos/"+plan.Project+"/actions/runs/1/approve", "/repos/"+plan.Project+"/actions/runners/registration-token", "/repos/"+plan.Project+"/environments/x/variables"),
			api("PUT", "", "/repos/"+plan.Project+"/actions/secrets/X", "/repos/"+plan.Project+"/collaborators/evil", "/repos/"+plan.Project+"/branches/main/protection", "/repos/"+plan.Project+"/dependabot/secrets/X"),
			api("PATCH", "", "/repos/"+plan.Project), api("DELETE", "", "/repos/"+plan.Project, "/repos/"+plan.Project+"/branches/main/protection"),
		),
		"hub-other": each(
			api("POST", "", "/repos/"+plan.Other+"/issues", "/repos/"+plan.Other+"/pulls", "/repos/"+plan.Other+"/git/refs", "/repos/"+plan.Other+"/merges", "/repositories/42/issues", "/repositories/42/git/refs"),
			api("PUT", "", "/repos/"+plan.Other+"/contents/x", "/repositories/42/contents/x"), api("DELETE", "", "/repos/"+plan.Other),
		),
		"hub-path": api("PUT", "",
			"/repos/"+plan.Project+"/contents/../../other/contents/x", "/repos/"+plan.Project+"/contents/%2e%2e/%2e%2e/other/contents/x", "/repos/"+plan.Project+"%2f..%2fother/contents/x",
			"/repos/"+plan.Project+"/contents/..%2f..%2fother%2fcontents%2fx", "//repos/"+plan.Other+"/contents/x", "/repos//"+plan.Other+"/contents/x", "/repos/"+plan.Project+"/../other/contents/x",
			"/repos/"+plan.Project+"\\..\\other/contents/x", "/repos/"+plan.Other+"/contents/%00/repos/"+plan.Project+"/contents/x", "/REPOS/ACME/OTHER/contents/x",
			"https://"+plan.ForgeAPI+"/repos/"+plan.Other+"/contents/x", "/repos/"+plan.Project+"/contents/;/../../other", "/repos/"+plan.Project+"/contents/./../../other/contents/x",
		),
		"hub-method": func(a *attempt) {
			for _, header := range []string{"X-HTTP-Method-Override: DELETE\r\n", "X-HTTP-Method: DELETE\r\n", "X-Method-Override: DELETE\r\n", "x_http_method_override: DELETE\r\n", "X-HTTP-Method-Override:DELETE\r\nX-HTTP-Method-Override: PUT\r\n"} {
				// The path itself would be allowed, so the server is asked in the header only.
				a.to(plan.ForgeAPI, post("POST", "/repos/"+plan.Project+"/issues", plan.ForgeAPI, header+"X-Token: "+a.token+"\r\n"+bearer(plan.ForgeKey), "{}"))
			}
			api("GET", "X-HTTP-Method-Override: DELETE\r\n", "/repos/"+plan.Project+"?method=1")(a)
			api("delete", "", "/repos/"+plan.Project)(a)
			api("PoSt", "", "/gists")(a)
		},
		"graphql-mutation": func(a *attempt) {
			name := `(input: {clientMutationId: "` + a.token + `"}) { clientMutationId }`
			for _, query := range []string{
				"mutation { deleteRef" + name + " }",
				"mutation { createRepository" + name + " }",
				"mutation { closeIssue: createCommitOnBranch" + name + " }",
				"mutation { ...F } fragment F on Mutation { createRef" + name + " }",
				"mutation { ... on Mutation { updateRefs" + name + " } }",
				"mutation { ... @include(if: true) { deleteRef" + name + " } }",
				"query A { viewer { login } } mutation B { deleteRef" + name + " }",
				"\ufeffmutation { deleteRef" + name + " }",
				"# comment\rmutation { deleteRef" + name + " }",
				"subscription { x" + name + " }",
			} {
				a.graphQL(map[string]any{"query": query})
				a.graphQL(map[string]any{"query": query, "operationName": "B"})
			}
		},
		"graphql-other": func(a *attempt) {
			create := func(input string) string {
				return `mutation($input: CreateIssueInput!, $id: ID! = "R_own") { createIssue(input: ` + input + `) { clientMutationId } }`
			}
			mark := `, clientMutationId: "` + a.token + `"}`
			for _, one := range []map[string]any{
				{"query": create(`{repositoryId: "R_other"` + mark)},
				{"query": create("$input"), "variables": map[string]any{"input": map[string]any{"repositoryId": "R_other", "clientMutationId": a.token}}},
				{"query": create(`{repositoryId: $id` + mark), "variables": map[string]any{"id": "R_other"}},
				{"query": create(`{repositoryId: "R_own", repositoryId: "R_other"` + mark)},
				{"query": create(`{repositoryId: """R_other"""` + mark)},
				{"query": create(`{repositoryId: "R_\u006fther"` + mark)},
				{"query": create(`{title: "no repository"` + mark)},
				{"query": `mutation { a: createIssue(input: {repositoryId: "R_own"}) { clientMutationId } b: createIssue(input: {repositoryId: "R_other"` + mark + `) { clientMutationId } }`},
			} {
				a.graphQL(one)
			}
		},
		"graphql-form": func(a *attempt) {
			evil := `mutation { deleteRef(input: {clientMutationId: "` + a.token + `"}) { clientMutationId } }`
			one, _ := json.Marshal(map[string]any{"query": evil}) // texts can be encoded
			key := bearer(plan.ForgeKey)
			kind := func(k string) string { return "Content-Type: " + k + "\r\n" + key }
			for _, body := range []string{
				"[" + string(one) + "]", string(one) + string(one), `{"query":"{viewer{login}}","query":` + string(one[9:]), `{"query":"{viewer{login}}","Query":` + string(one[9:]),
				`{"query":` + string(one[9:len(one)-1]) + `,"query":"{viewer{login}}"}`, "\xef\xbb\xbf" + string(one), `{"id":"x","query":null,"extensions":{"persistedQuery":{"sha256Hash":"` + a.token + `"}}}`,
			} {
				a.to(plan.ForgeAPI, post("POST", "/graphql", plan.ForgeAPI, kind("application/json"), body))
			}
			a.to(plan.ForgeAPI, post("POST", "/graphql", plan.ForgeAPI, kind("application/x-www-form-urlencoded"), "query="+url.QueryEscape(evil)))
			a.to(plan.ForgeAPI, post("POST", "/graphql", plan.ForgeAPI, kind("application/graphql"), evil))
			a.to(plan.ForgeAPI, post("POST", "/graphql?query="+url.QueryEscape(evil), plan.ForgeAPI, kind("application/json"), `{"query":"{viewer{login}}"}`))
			a.to(plan.ForgeAPI, request("GET", "/graphql?query="+url.QueryEscape(evil), plan.ForgeAPI, key))
			a.to(plan.ForgeAPI, post("POST", "/graphql/", plan.ForgeAPI, kind("application/json"), string(one)))
			a.to(plan.ForgeAPI, post("POST", "/GraphQL", plan.ForgeAPI, kind("application/json"), string(one)))
			a.to(plan.ForgeAPI, post("PUT", "/graphql", plan.ForgeAPI, kind("application/json"), string(one)))
			var zipped bytes.Buffer
			z := gzip.NewWriter(&zipped)
			_, _ = z.Write(one) // the buffer takes everything
			_ = z.Close()
			a.to(plan.ForgeAPI, post("POST", "/graphql?"+a.token, plan.ForgeAPI, "Content-Encoding: gzip\r\n"+kind("application/json"), zipped.String()))
		},
		"budget-over": func(a *attempt) {
			for range 3 {
				a.to(plan.Model, a.prompt("/v1/messages", ""))
			}
			kept := strings.ReplaceAll(a.prompt("/v1/messages", ""), "Connection: close\r\n", "")
			a.to(plan.Model, kept+kept+a.prompt("/v1/messages", ""))
			f := append(fields("POST", plan.Model, "/v1/messages", plan.ModelKey), field{"x-api-key", value(plan.ModelKey)}, field{"x-token", a.token}, field{"content-type", "application/json"})
			a.h2(plan.Model, stream{fields: f, body: prompt}, stream{fields: f, body: prompt})
		},
		"budget-race": func(a *attempt) {
			var done sync.WaitGroup
			for range 40 {
				done.Go(func() { a.to(plan.Model, a.prompt("/v1/messages", "")) })
			}
			done.Wait()
		},
		"budget-path": func(a *attempt) {
			for _, path := range []string{
				"/v1/messages/", "//v1/messages", "/v1//messages", "/v1/./messages", "/v1/x/../messages", "/v1/%6dessages", "/v1%2fmessages", "/V1/MESSAGES", "/v1/messages?beta=true", "/v1/messages%3f",
				"/v1/messages;x", "/v1/complete", "/v1/messages/batches", "/v1/messages\\", "/v2/messages", "/v1/agents", "/v1/sessions", "/v1/messages/count_tokens/../", "https://" + plan.Model + "/v1/messages",
			} {
				a.to(plan.Model, a.prompt(path, ""))
			}
			for _, method := range []string{"PUT", "post", "PATCH", "QUERY"} {
				a.to(plan.Model, strings.Replace(a.prompt("/v1/messages", ""), "POST", method, 1))
			}
			a.to(plan.Model, a.prompt("/v1/messages", "X-HTTP-Method-Override: POST\r\n"))
		},
		"budget-host": func(a *attempt) {
			a.send(plan.Model, 80, a.prompt("/v1/messages", ""))
			a.secure(plan.Model, 443, strings.ToUpper(plan.Model), a.prompt("/v1/messages", ""))
			a.to(plan.Model, strings.Replace(a.prompt("/v1/messages", ""), "Host: "+plan.Model, "Host: "+strings.ToUpper(plan.Model)+".", 1))
			a.to(plan.Model, strings.Replace(a.prompt("/v1/messages", ""), "Host: "+plan.Model, "Host: "+plan.Model+":443", 1))
			a.secure(plan.Bound, 443, plan.Bound, a.prompt("/v1/messages", ""))
			a.secure(plan.Model, 443, plan.Allowed, a.prompt("/v1/messages", ""))
		},
		"budget-hidden": func(a *attempt) {
			var zipped bytes.Buffer
			z := gzip.NewWriter(&zipped)
			_, _ = io.WriteString(z, prompt) // the buffer takes everything
			_ = z.Close()
			head := "X-Api-Key: " + value(plan.ModelKey) + "\r\nX-Token: " + a.token + "\r\nContent-Type: application/json\r\n"
			for _, body := range []string{zipped.String(), "", "{", "[]", `{"model":7}`, `{"max_tokens":0}`, `{"model":"claude-haiku-4-5","max_tokens":1,"messages":[]}`, prompt[:1] + `"pad":"` + strings.Repeat("x", 2<<20) + `",` + prompt[1:]} {
				for _, encoding := range []string{"", "Content-Encoding: gzip\r\n", "Content-Encoding: identity\r\n", "Content-Encoding: unknown\r\n"} {
					a.to(plan.Model, post("POST", "/v1/messages", plan.Model, encoding+head, body))
				}
			}
			a.to(plan.Model, request("GET", "/v1/messages", plan.Model, "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"+head))
			a.to(plan.Model, "POST /v1/messages HTTP/1.1\r\nHost: "+plan.Model+"\r\n"+head+"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"+fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(prompt), prompt))
		},
	}
}

// graphQL sends a GraphQL request.
func (a *attempt) graphQL(one map[string]any) {
	body, err := json.Marshal(one)
	if err != nil {
		say("graphql: %v", err)
		return
	}
	a.to(plan.ForgeAPI, post("POST", "/graphql", plan.ForgeAPI, "Content-Type: application/json\r\n"+bearer(plan.ForgeKey), string(body)))
}

const prompt = `{"model":"claude-opus-4-5","max_tokens":1000,"messages":[{"role":"user","content":"hello"}]}`

// prompt returns a request to a model.
func (a *attempt) prompt(path, headers string) string {
	return post("POST", path, plan.Model, headers+"X-Api-Key: "+value(plan.ModelKey)+"\r\nX-Token: "+a.token+"\r\nContent-Type: application/json\r\nAnthropic-Version: 2023-06-01\r\n", prompt)
}
