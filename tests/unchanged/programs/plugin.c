/* SPDX-License-Identifier: Apache-2.0 */
/* plugin.c: with -DPLUGIN a plugin, else a program that loads those it is given, each way there is. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

#ifdef PLUGIN
int plugin_value(void);
int plugin_value(void) { return PLUGIN; }
static __attribute__((constructor)) void start(void) { printf("plugin %d starts\n", PLUGIN); }
static __attribute__((destructor)) void stop(void) { printf("plugin %d stops\n", PLUGIN); }
#else
static void show(const char *what, int found)
{
	const char *said = dlerror();
	printf("%s: %d, %s\n", what, found, said != NULL ? said : "no error");
}

int main(int argc, char **argv)
{
	static const int flags[] = { RTLD_NOW, RTLD_LAZY | RTLD_GLOBAL, RTLD_NOW | RTLD_DEEPBIND };
	for (int i = 1; i < argc; i++) {
		for (size_t f = 0; f < sizeof flags / sizeof flags[0]; f++) {
			void *handle = dlopen(argv[i], flags[f]);
			int (*value)(void);
			show("open", handle != NULL);
			if (handle == NULL)
				continue;
			*(void **)&value = dlsym(handle, "plugin_value");
			show("value", value());
			show("default", dlsym(RTLD_DEFAULT, "plugin_value") != NULL);
			show("missing", dlsym(handle, "plugin_missing") != NULL);
			show("version", dlvsym(handle, "plugin_value", "NONE_1") != NULL);
			show("close", dlclose(handle) == 0);
		}
	}
	show("namespace", dlmopen(LM_ID_NEWLM, "libm.so.6", RTLD_NOW) != NULL);
	return 0;
}
#endif
