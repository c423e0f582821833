package traceid

import (
	"net/http"
	"strings"
	"testing"
)

const some = "4bf92f3577b34da6a3ce929d0e0e4736"

func TestParse(t *testing.T) {
	for in, want := range map[string]string{
		some:                                    some,
		"4BF92F3577B34DA6A3CE929D0E0E4736":      some,
		"4bf92f35-77b3-4da6-a3ce-929d0e0e4736":  some,
		"":                                      "",
		"00000000000000000000000000000000":      "",
		"4bf92f3577b34da6a3ce929d0e0e473":       "",
		"4bf92f3577b34da6a3ce929d0e0e47361":     "",
		"4bf92f3577b34da6a3ce929d0e0e473\n":     "",
		"gbf92f3577b34da6a3ce929d0e0e4736":      "",
		"4bf92f35-77b3-4da6-a3ce929d-0e0e4736-": "",
		"4bf92f357-7b3-4da6-a3ce-929d0e0e4736":  "",
		"--------------------------------":      "",
		"４bf92f3577b34da6a3ce929d0e0e4736":      "", // a digit, but not an ASCII one
	} {
		if got, ok := Parse(in); got != want || ok != (want != "") {
			t.Errorf("Parse(%q) = %q, %t, want %q", in, got, ok, want)
		}
	}
}

func TestFromParent(t *testing.T) {
	for in, want := range map[string]string{
		"00-" + some + "-00f067aa0ba902b7-01":                        some,
		"01-" + some + "-00f067aa0ba902b7-01-what-comes":             some, // a later version may have more fields
		"00-" + some + "-00f067aa0ba902b7-01-what":                   "",
		"ff-" + some + "-00f067aa0ba902b7-01":                        "",
		"0g-" + some + "-00f067aa0ba902b7-01":                        "",
		"00-" + some + "-0000000000000000-01":                        "",
		"00-00000000000000000000000000000000-00f067aa0ba902b7-01":    "",
		"00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01":    "",
		"00-" + some + "-00f067aa0ba902b7":                           "",
		"00-" + some + "-00f067aa0ba902b7-1":                         "",
		"":                                                           "",
		"00-4bf92f35-77b3-4da6-a3ce-929d0e0e4736-00f067aa0ba902b7-1": "",
	} {
		if got, ok := FromParent(in); got != want || ok != (want != "") {
			t.Errorf("FromParent(%q) = %q, %t, want %q", in, got, ok, want)
		}
	}
}

func TestFromHeader(t *testing.T) {
	const other = "0af7651916cd43dd8448eb211c80319c"
	h := http.Header{}
	made := FromHeader(h.Get)
	if _, ok := Parse(made); !ok || made == FromHeader(h.Get) {
		t.Errorf("FromHeader without a header = %q, want a valid id, another each time", made)
	}
	h.Set("traceparent", "00-"+other+"-00f067aa0ba902b7-01")
	if got := FromHeader(h.Get); got != other {
		t.Errorf("FromHeader with traceparent = %q, want %q", got, other)
	}
	h.Set("x-trace-id", some)
	if got := FromHeader(h.Get); got != some {
		t.Errorf("FromHeader with x-trace-id = %q, want %q", got, some)
	}
	h.Set("x-trace-id", "../../etc/passwd")
	if got := FromHeader(h.Get); got != other {
		t.Errorf("FromHeader with a bad x-trace-id = %q, want %q of traceparent", got, other)
	}
}

func TestEnviron(t *testing.T) {
	if env := Environ(t.Context(), []string{"A=b"}); len(env) != 1 {
		t.Errorf("Environ without an id = %q, want 1 variable", env)
	}
	env := Environ(With(t.Context(), some), []string{"A=b"})
	value, ok := strings.CutPrefix(env[len(env)-1], Variable+"=")
	if id, valid := FromParent(value); !ok || !valid || id != some || len(env) != 2 {
		t.Errorf("Environ = %q, want 2 variables with id %s", env, some)
	}
}

func TestContext(t *testing.T) {
	ctx := With(t.Context(), some)
	if ID(ctx) != some || ID(t.Context()) != "" || ID(With(ctx, "")) != some {
		t.Errorf("ID = %q, without an id %q, after an empty one %q, want %q, \"\", %q", ID(ctx), ID(t.Context()), ID(With(ctx, "")), some, some)
	}
}
