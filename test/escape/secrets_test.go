//go:build escape

package escape

import (
	"bufio"
	"bytes"
	"compress/flate"
	"compress/gzip"
	"crypto/tls"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/klauspost/compress/zstd"

	"github.com/agent-sessionizer/agent-sessionizer/test/escape/plan"
)

// keys are the secrets of the sessions, by variable.
type keys map[string]string

func newKeys() keys {
	return keys{
		plan.Key:      "bk/" + random() + "+" + random() + "/" + random() + random() + "=", // changed by every encoding
		plan.ForgeKey: "ghp_" + random() + random() + random() + random(),
		plan.ModelKey: "sk-ant-api03-" + random() + random() + random() + random(),
	}
}

// in returns the variables whose secret a text contains, also in basic authentication.
func (k keys) in(text string) (found []string) {
	for line := range strings.Lines(text) {
		if _, credentials, ok := strings.Cut(line, "Basic "); ok {
			plain, _ := base64.StdEncoding.DecodeString(strings.TrimSpace(credentials)) // as far as it goes
			text += "\n" + string(plain)
		}
	}
	for name, value := range k {
		if strings.Contains(text, value) {
			found = append(found, name)
		}
	}
	slices.Sort(found)
	return found
}

// budget is what the sessions may still ask of the model.
type budget struct {
	mu   sync.Mutex
	room int
}

func (b *budget) set(room int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.room = room
}

func (b *budget) left() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.room
}

func (b *budget) take() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.room--
	return b.room >= 0
}

// secretHosts are the hosts that a secret is bound to.
var secretHosts = []string{plan.Bound, plan.Forge, plan.ForgeAPI, plan.Model}

// misuse returns why a request to a host that a secret is bound to must not have arrived with
// it, or "".
func (w *world) misuse(host string, q request) string {
	found := w.keys.in(q.head + "\n" + q.upload)
	if len(found) == 0 {
		return ""
	}
	if slices.ContainsFunc(q.hosts, func(h string) bool { name, _, _ := strings.Cut(h, ":"); return !strings.EqualFold(name, host) }) {
		return fmt.Sprintf("with the secret %v for %q", found, q.hosts)
	}
	head := strings.ToLower(q.head)
	switch host {
	case plan.Bound:
		value, names := w.keys[plan.Key], ""
		for line := range strings.Lines(q.head) {
			name, _, _ := strings.Cut(line, ":")
			names += name + "\n"
		}
		switch {
		case !slices.Equal(found, []string{plan.Key}):
			return fmt.Sprintf("with the secret %v of another host", found)
		case strings.Contains(q.target, plan.Forbidden):
			return "with a secret that is not its"
		case strings.Contains(q.upload, value):
			return "with the secret in its body"
		case strings.Contains(names, value) || slices.ContainsFunc([]func(string) (string, error){url.PathUnescape, url.QueryUnescape}, func(decode func(string) (string, error)) bool {
			plain, _ := decode(q.target) // an empty text has no secret
			return strings.Contains(plain, value)
		}):
			return "with the secret outside of the headers' values"
		}
	case plan.Model:
		if !w.budget.take() {
			return "above the budget"
		}
	default:
		method, _, _ := strings.Cut(head, " ")
		override := strings.Contains(strings.ReplaceAll(head, "_", "-"), "x-http-method") || strings.Contains(head, "x-method-override")
		allowed := method == "get" && !strings.Contains(q.target, "graphql") || q.target == "/repos/"+plan.Project+"/issues"
		mutation := strings.Contains(strings.ToLower(q.target), "graphql") && tokens.MatchString(q.upload)
		if (tokens.MatchString(head) || mutation) && (!allowed || override) {
			return "for something that the session must not do"
		}
	}
	return ""
}

// received judges a request to a host that a secret is bound to.
func (w *world) received(addr, host string, q request) {
	first, _, _ := strings.Cut(q.head, "\r\n")
	place := fmt.Sprintf("%q at %s for %s", first, addr, host)
	why := w.misuse(host, q)
	if why != "" {
		place += " " + why
	}
	w.sawTokens(place, why == "", tokens.FindAllString(strings.ToLower(q.head+q.upload), -1))
}

// serveLenient answers HTTP/1.1 on a connection to a host that a secret is bound to.
func (s *tlsServer) serveLenient(addr, host string, c *tls.Conn) {
	r := bufio.NewReader(c)
	for {
		q, err := readRequest(r, addr == plan.CDN2)
		if q.head == "" && err != nil {
			return
		}
		s.received(addr, host, q)
		if err != nil {
			return
		}
		text, end := s.respondTo(host, q)
		if _, err := io.WriteString(c, text); err != nil || end || strings.Contains(strings.ToLower(q.head), "connection: close") {
			return
		}
	}
}

// respondTo returns the answer of a host that a secret is bound to.
func (s *tlsServer) respondTo(host string, q request) (text string, end bool) {
	u, err := url.Parse(q.target)
	if err != nil {
		return plainAnswer("no"), false
	}
	if u.Path == control {
		return plainAnswer(fmt.Sprintf("has %v", s.keys.in(q.head))), false
	}
	switch host {
	case plan.Model:
		return "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: " + strconv.Itoa(len(modelAnswer)) + "\r\n\r\n" + modelAnswer, false
	case plan.ForgeAPI:
		return plainAnswer(owners(q.upload)), false
	case plan.Bound:
		method, _, _ := strings.Cut(q.head, " ")
		switch {
		case method != http.MethodGet && method != http.MethodPost:
			return plainAnswer(q.head), false // as TRACE does
		case u.Path == "/redirect":
			return "HTTP/1.1 302 Found\r\nLocation: " + u.Query().Get("to") + "\r\nContent-Length: 0\r\n\r\n", false
		case strings.HasSuffix(u.Path, "/reflect"):
			return reflect(u.Query().Get("as"), s.reflected(q.head), q.head)
		}
	}
	return plainAnswer("welcome"), false
}

// reflected returns the secret in a request, or what the client had instead.
func (s *tlsServer) reflected(head string) string {
	if len(s.keys.in(head)) > 0 {
		return s.keys[plan.Key]
	}
	return "nothing"
}

func plainAnswer(text string) string {
	return fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(text), text)
}

// modelAnswer is the answer of a model, with what it used (2,000 tokens).
const modelAnswer = `{"id":"msg_1","type":"message","role":"assistant","model":"claude-opus-4-5","content":[{"type":"text","text":"hello"}],"stop_reason":"end_turn","usage":{"input_tokens":1000,"output_tokens":1000}}`

// owners answers a question for the repositories of objects.
func owners(body string) string {
	var q struct {
		Query     string
		Variables struct{ IDs []string }
	}
	if err := json.Unmarshal([]byte(body), &q); err != nil || !strings.Contains(q.Query, "nodes(") {
		return `{"data":{}}`
	}
	nodes := []map[string]any{}
	for _, id := range q.Variables.IDs {
		nodes = append(nodes, map[string]any{"nameWithOwner": map[string]string{"R_own": plan.Project, "R_other": plan.Other}[id]})
	}
	text, err := json.Marshal(map[string]any{"data": map[string]any{"nodes": nodes}})
	if err != nil {
		return "{}"
	}
	return string(text)
}

// encoders are the forms in which a host can answer with a secret.
var encoders = map[string]func(string) string{
	"plain":     func(s string) string { return s },
	"base64":    func(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) },
	"base64-1":  func(s string) string { return base64.StdEncoding.EncodeToString([]byte("x" + s + "yy")) },
	"base64-2":  func(s string) string { return base64.StdEncoding.EncodeToString([]byte("xx" + s + "y")) },
	"base64url": func(s string) string { return base64.RawURLEncoding.EncodeToString([]byte(s)) },
	"hex":       func(s string) string { return hex.EncodeToString([]byte(s)) },
	"HEX":       func(s string) string { return strings.ToUpper(hex.EncodeToString([]byte(s))) },
	"percent":   url.QueryEscape,
	"json":      func(s string) string { return `{"k":"` + strings.ReplaceAll(s, "/", `\/`) + `"}` },
	"reverse": func(s string) string {
		b := []byte(s)
		slices.Reverse(b)
		return string(b)
	},
}

// compressed returns a text in a content coding.
func compressed(coding, text string) string {
	var b bytes.Buffer
	var w io.WriteCloser
	switch coding {
	case "deflate":
		w, _ = flate.NewWriter(&b, flate.BestSpeed) // the level is valid
	case "zstd":
		w, _ = zstd.NewWriter(&b) // has no options that could be invalid
	default:
		w = gzip.NewWriter(&b)
	}
	_, _ = io.WriteString(w, text) // the buffer takes everything
	_ = w.Close()
	return b.String()
}

// reflect returns an answer with a secret in some form. end says that the connection ends with it.
func reflect(form, secret, head string) (text string, end bool) {
	chunk := func(s string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(s), s) }
	bytewise := func(s string) (out string) {
		for i := range len(s) {
			out += chunk(s[i : i+1])
		}
		return out + "0\r\n\r\n"
	}
	const chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n"
	switch form {
	case "bytes":
		return chunked + "\r\n" + bytewise("secret: "+secret), false
	case "header":
		return "HTTP/1.1 200 OK\r\nX-Secret: " + secret + "\r\nX-Secret: " + url.QueryEscape(secret) + "\r\nSet-Cookie: k=" + secret + "\r\nLocation: https://x.example/?k=" + secret + "\r\nContent-Length: 0\r\n\r\n", false
	case "reason":
		return "HTTP/1.1 200 " + secret + "\r\nContent-Length: 0\r\n\r\n", false
	case "name":
		return "HTTP/1.1 200 OK\r\nX-" + hex.EncodeToString([]byte(secret)) + ": y\r\nContent-Length: 0\r\n\r\n", false
	case "trailername":
		return chunked + "Trailer: X-" + hex.EncodeToString([]byte(secret)) + "\r\n\r\n0\r\nX-" + hex.EncodeToString([]byte(secret)) + ": y\r\n\r\n", false
	case "trailer":
		return chunked + "Trailer: X-Secret\r\n\r\n" + chunk("ok") + "0\r\nX-Secret: " + secret + "\r\n\r\n", false
	case "extension":
		return chunked + "\r\n2;" + secret + "\r\nok\r\n0;" + secret + "\r\n\r\n", false
	case "early":
		return "HTTP/1.1 103 Early Hints\r\nLink: <" + secret + ">\r\n\r\n" + plainAnswer("ok"), false
	case "continue":
		return "HTTP/1.1 100 Continue\r\nX-Secret: " + secret + "\r\n\r\n" + plainAnswer("ok"), false
	case "gzip", "deflate", "zstd":
		z := compressed(form, "secret: "+secret)
		return fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Encoding: %s\r\nContent-Length: %d\r\n\r\n%s", form, len(z), z), false
	case "transfer":
		z := compressed("gzip", "secret: "+secret)
		return "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n" + chunk(z) + "0\r\n\r\n", false
	case "304":
		return "HTTP/1.1 304 Not Modified\r\nETag: \"" + secret + "\"\r\n\r\n", false
	case "400", "404", "431", "500":
		return fmt.Sprintf("HTTP/1.1 %s Error\r\nContent-Type: text/html\r\nWWW-Authenticate: Bearer %s\r\nContent-Length: %d\r\n\r\n<h1>%s</h1>", form, secret, len(secret)+9, secret), false
	case "events":
		return "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\nevent: " + secret + "\ndata: " + secret + "\n\n", true
	case "websocket", "websocket-deflated":
		frame := append([]byte{0x81, byte(len(secret))}, secret...)
		extension := ""
		if form != "websocket" && strings.Contains(strings.ToLower(head), "permessage-deflate") {
			z := strings.TrimSuffix(compressed("deflate", secret), "\x00\x00\xff\xff")
			frame, extension = append([]byte{0xc1, byte(len(z))}, z...), "Sec-WebSocket-Extensions: permessage-deflate\r\n"
		}
		return "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n" + extension + "\r\n" + string(frame), true
	}
	if encode := encoders[form]; encode != nil {
		body := encode(secret)
		for line := range strings.Lines(head) {
			var from, to int
			if n, err := fmt.Sscanf(line, "Range: bytes=%d-%d", &from, &to); n == 2 && err == nil {
				from, to = min(from, len(body)), min(to+1, len(body))
				part := body[from:to]
				return fmt.Sprintf("HTTP/1.1 206 Partial Content\r\nContent-Range: bytes %d-%d/%d\r\nContent-Length: %d\r\n\r\n%s", from, to-1, len(body), len(part), part), false
			}
		}
		return plainAnswer(body), false
	}
	return plainAnswer("unknown form " + form), false
}

// serveSecretH2 answers HTTP/2 on a connection to a host that a secret is bound to.
func (s *tlsServer) serveSecretH2(rw http.ResponseWriter, r *http.Request, addr, host string) {
	var head strings.Builder
	fmt.Fprintf(&head, "%s %s HTTP/2\r\n", r.Method, r.URL)
	_ = r.Header.Write(&head) // a builder takes everything
	body, err := io.ReadAll(io.LimitReader(r.Body, 1<<20))
	if err != nil {
		body = append(body, err.Error()...)
	}
	q := request{target: r.URL.String(), head: head.String(), hosts: []string{r.Host}, upload: string(body)}
	s.received(addr, host, q)
	secret := s.reflected(q.head)
	switch as := r.URL.Query().Get("as"); {
	case r.URL.Path == control:
		_, _ = fmt.Fprintf(rw, "has %v", s.keys.in(q.head)) // the client may be gone, here and below
	case host == plan.Model:
		rw.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(rw, modelAnswer)
	case host == plan.ForgeAPI:
		_, _ = io.WriteString(rw, owners(q.upload))
	case host != plan.Bound || !strings.HasSuffix(r.URL.Path, "/reflect"):
		_, _ = io.WriteString(rw, "welcome")
	case as == "header":
		rw.Header().Set("X-Secret", secret)
	case as == "name":
		rw.Header().Set("X-"+hex.EncodeToString([]byte(secret)), "y")
	case as == "trailer":
		rw.Header().Set("Trailer", "X-Secret")
		_, _ = io.WriteString(rw, "ok")
		rw.Header().Set("X-Secret", secret)
	case as == "early":
		rw.Header().Set("Link", "<"+secret+">")
		rw.WriteHeader(http.StatusEarlyHints)
		rw.Header().Del("Link")
	default:
		for _, b := range []byte(secret) {
			_, _ = rw.Write([]byte{b})
			if f, ok := rw.(http.Flusher); ok && as == "bytes" {
				f.Flush()
			}
		}
	}
}

// searchHost returns the places on the host that have a secret and that the VM's process could
// give away: the memory of QEMU, files of the VM, and arguments.
func (g *guest) searchHost() (places []string) {
	look := func(r io.Reader, place string) {
		buf := make([]byte, 1<<20)
		kept := 0
		for {
			n, err := r.Read(buf[kept:])
			data := buf[:kept+n]
			for name, value := range g.keys {
				if bytes.Contains(data, []byte(value)) {
					places = append(places, place+" has "+name)
					return
				}
			}
			if err != nil {
				return
			}
			kept = copy(buf, data[max(0, len(data)-100):])
		}
	}
	commands, _ := filepath.Glob("/proc/[0-9]*/cmdline") // the pattern is valid
	for _, path := range commands {
		if text, err := os.ReadFile(path); err == nil { // otherwise the process has ended
			look(bytes.NewReader(text), "arguments of a process")
		}
	}
	count := 0
	for pid := range g.Processes(g.name + "/") {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		if err != nil || !strings.HasPrefix(string(text), "qemu-system") {
			continue
		}
		count++
		maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
		memory, err2 := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
		if err != nil || err2 != nil {
			g.t.Errorf("memory of QEMU: %v, %v", err, err2)
			continue
		}
		for line := range strings.Lines(string(maps)) {
			var from, to int64
			if n, err := fmt.Sscanf(line, "%x-%x rw", &from, &to); n == 2 && err == nil {
				look(io.NewSectionReader(memory, from, to-from), "QEMU's memory")
			}
		}
		memory.Close()
	}
	if count != 1 {
		g.t.Errorf("QEMU processes of %s = %d, want 1", g.name, count)
	}
	searched := 0
	err := filepath.WalkDir(g.Home, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() || strings.HasPrefix(path, g.keyDir()) {
			return nil //nolint:nilerr // files come and go
		}
		f, err := os.Open(path)
		if err != nil {
			return nil //nolint:nilerr // likewise
		}
		defer f.Close()
		searched++
		look(f, "the file "+filepath.Base(path))
		return nil
	})
	if err != nil || searched < 10 {
		g.t.Errorf("searched files = %d, %v, want those of the VM", searched, err)
	}
	slices.Sort(places)
	return slices.Compact(places)
}

func (s *suite) keyDir() string { return filepath.Join(s.Home, "keys") }

// control is a path that answers with the names of the secrets in a request.
const control = "/control"

// uses checks that the guest can use its secrets as it should: techniques that fail although they
// could not work show nothing.
func (g *guest) uses() {
	g.t.Helper()
	for host, name := range map[string]string{plan.Bound: plan.Key, plan.ForgeAPI: plan.ForgeKey} {
		got := strings.TrimSpace(g.MustIn(g.name, `curl -fsS -m 60 https://`+host+control+` -H "Authorization: Bearer $`+name+`"`))
		if want := "has [" + name + "]"; got != want {
			g.t.Fatalf("request to %s with a placeholder = %q, want %q", host, got, want)
		}
	}
	g.budget.set(1)
	g.MustIn(g.name, `curl -fsS -m 60 https://`+plan.Model+`/v1/messages -H "X-Api-Key: $`+plan.ModelKey+`" -H 'Content-Type: application/json' -d '{"model":"claude-opus-4-5","max_tokens":100,"messages":[]}'`)
	if g.budget.left() != 0 {
		g.t.Fatal("requests of a model with a placeholder = 0, want 1")
	}
}

// secretSettings returns the secrets of a session's settings. Without a gateway, the guest has
// their values.
func (s *suite) secretSettings(enforce bool) string {
	text := "secrets:\n"
	for name, value := range s.keys {
		s.Write("keys/"+name, value)
		from := strconv.Quote("file:" + filepath.Join(s.keyDir(), name))
		switch {
		case !enforce:
			from = "{from: " + from + ", guest: true}"
		case name == plan.Key: // the others have bindings and rules that the program ships
			from = "{from: " + from + ", to: [" + plan.Bound + "], like: bk/}"
		}
		text += "  " + name + ": " + from + "\n"
	}
	if enforce {
		text += "budget: {tokens: 1000}\n"
	}
	return text
}

// spend uses up the budget of a session, with room for that many requests.
func (g *guest) spend(room int) {
	g.t.Helper()
	if g.stock {
		g.budget.set(room)
		return
	}
	g.budget.set(room)
	if room == 0 {
		return // uses has used it up
	}
	var used struct {
		Total struct {
			Tokens int64 `json:"tokens"`
		} `json:"total"`
	}
	if err := json.Unmarshal([]byte(g.Asz("usage", "--json", g.name)), &used); err != nil || used.Total.Tokens == 0 {
		g.t.Fatalf("usage = %+v, %v, want what a request has used", used, err)
	}
	// The gateway has the new budget, although it cannot reach the guest's agent, which was stopped.
	g.Run("agent-sessionizer", "budget", g.name, "--tokens", strconv.FormatInt(used.Total.Tokens+int64(room), 10))
}
